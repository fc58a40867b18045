#!/bin/sh
# Both services with buf (or grpcurl) and no file of ours: reflection tells their protos.
# Usage: reflection.sh [INFERENCE [REGISTRY]]; with BUF=.venv/bin/buf if buf is not on the path.
set -eu
inference=${1:-localhost:50052}
registry=${2:-localhost:50051}

call() { # ADDRESS METHOD REQUEST
    echo "> $2"
    "${BUF:-buf}" curl --protocol grpc --http2-prior-knowledge --data "$3" "http://$1/$2"
}

call "$registry" grpc.health.v1.Health/Check '{"service": "loraplex.registry.v1.AdapterRegistryService"}'
call "$inference" grpc.health.v1.Health/Check '{"service": "loraplex.inference.v1.InferenceService"}'

call "$registry" loraplex.registry.v1.AdapterRegistryService/RegisterAdapter '{
    "adapter_id": "curled", "base_model": "smollm2-135m-instruct", "source": {"uri": "file://examples/json"}
}'

# Proto JSON takes field names as in the protos or in camelCase; what comes back is in camelCase.
call "$inference" loraplex.inference.v1.InferenceService/Generate '{
    "adapter": "curled",
    "chat": {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    "sampling": {"temperature": 0},
    "stop": {"max_tokens": 16}
}'
