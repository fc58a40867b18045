"""Several servers of one service behind one client channel, as a headless Service makes them."""

import json
from collections.abc import Sequence

import grpc

from examples.stack import INFERENCE_SERVICE, Stack
from loraplex import Client
from loraplex.inference.v1 import inference_pb2_grpc

LONGEST_BACKOFF_MS = 1_000
RECONNECTED_SECONDS = 2.0  # after which such a channel has found a server that is there again


def balanced_channel(addresses: Sequence[str], service: str) -> grpc.aio.Channel:
    """round_robin over the addresses where `service` is SERVING: what any language's gRPC can be told.

    An end that is silent is noticed within seven seconds. The connections are the channel's own.
    """
    config = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": service}}
    options = [
        ("grpc.service_config", json.dumps(config)),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", LONGEST_BACKOFF_MS),
        ("grpc.keepalive_time_ms", 5_000),
        ("grpc.keepalive_timeout_ms", 2_000),  # of TCP's acknowledgements …
        ("grpc.http2.ping_timeout_ms", 2_000),  # … and of the other end's own
    ]
    return grpc.aio.insecure_channel("ipv4:" + ",".join(addresses), options)


def client_of(stack: Stack, *addresses: str) -> Client:
    """A client of the stack whose streams go to the replicas at these addresses in turn."""
    client = stack.client()
    client.inference = inference_pb2_grpc.InferenceServiceStub(balanced_channel(addresses, INFERENCE_SERVICE))
    return client
