"""What the engine says of a client that it cannot reach: API processes are not its only ones."""

import pytest
import zmq

from inference_service.engine.sockets import ApiSocket
from inference_service.types import Reply


@pytest.mark.parametrize("client", ["api-7", "adapters", "supervisor"])
def test_a_client_that_is_gone_is_named(client, tmp_path, caplog):
    with zmq.Context() as context:
        clients = ApiSocket(context, f"ipc://{tmp_path}/s")
        assert not clients.send(client.encode(), Reply(1))
        clients.socket.close()
    assert caplog.messages == [f"the engine's client {client} is gone: Host unreachable"]
