// Streams one answer. `buf generate` in this folder makes gen/ of the protos; see docs/clients.md.
// Usage: go run . [INFERENCE]
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	_ "google.golang.org/grpc/health" // without it healthCheckConfig does nothing

	pb "example.com/client/gen/loraplex/inference/v1"
)

func main() {
	target := "dns:///localhost:50052"
	if len(os.Args) > 1 {
		target = os.Args[1]
	}
	conn, err := grpc.NewClient(target,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"round_robin": {}}],
			"healthCheckConfig": {"serviceName": "loraplex.inference.v1.InferenceService"}}`))
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute) // the server honours it, and ends at a cancel
	defer cancel()

	temperature, maxTokens := float64(0), int32(24)
	stream, err := pb.NewInferenceServiceClient(conn).Generate(ctx, &pb.GenerateRequest{
		Adapter: "pirate",
		Prompt: &pb.GenerateRequest_Chat{Chat: &pb.Chat{
			Messages: []*pb.ChatMessage{{Role: "user", Content: "What is the capital of France?"}},
		}},
		Sampling: &pb.Sampling{Temperature: &temperature}, // optional fields are pointers: nil is not zero
		Stop:     &pb.Stop{MaxTokens: &maxTokens},
	})
	for err == nil {
		var event *pb.GenerateResponse
		if event, err = stream.Recv(); err == nil {
			fmt.Print(event.GetDelta().GetText())
		}
	}
	if !errors.Is(err, io.EOF) {
		log.Fatal(err) // status.FromError(err) has the reason, in an ErrorInfo among its details
	}
}
