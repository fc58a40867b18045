"""`make serve` and its like on a machine where one of their ports is taken."""

import socket
import sys

import pytest

from examples import demo, serve
from examples.stack import REGISTRY_SERVICE, NotServing, ServerProcess, Stack, free_address
from shared.errors import InvalidArgument


@pytest.mark.parametrize("flag", ["--registry", "--inference", "--metrics"])
def test_a_taken_port_is_told_before_anything_is_started(flag, tmp_path, monkeypatch):
    """What listens there may be a registry of its own, into which no example adapters belong."""
    monkeypatch.setattr(serve, "ROOT", tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = {each: free_address() for each in ("--registry", "--inference", "--metrics")} | {flag: address}
        monkeypatch.setattr(sys, "argv", ["serve", *(word for pair in flags.items() for word in pair)])
        with pytest.raises(SystemExit) as caught:
            serve.main()
    assert caught.value.code == f"error: {flag}: cannot listen on {address}: address already in use"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("taken", ["registry", "inference"])
async def test_neither_service_is_started_beside_a_foreign_one(taken, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stack = Stack(tmp_path / "run", **{taken: f"127.0.0.1:{listener.getsockname()[1]}"})
        with pytest.raises(InvalidArgument, match=f"^{taken}: cannot listen on "):
            await stack.start()
    assert stack.registry.process is stack.inference.process is None
    assert not (tmp_path / "run").exists()


def test_a_demo_that_cannot_start_says_so_in_one_line(monkeypatch):
    """Its own ports are free ones; a service may be unable to start all the same."""

    def fail(self):
        raise NotServing("x is not serving: why")

    monkeypatch.setattr(demo.Stack, "start", fail)
    with pytest.raises(SystemExit) as caught:
        demo.main()
    assert caught.value.code == "error: x is not serving: why"


@pytest.mark.parametrize(
    ("log", "told"),
    [("{}\nerror: --a: is wrong\n", "--a: is wrong"), ("{}\nKilled\n", "the end of LOG:\n{}\nKilled")],
)
def test_the_last_words_of_a_service(log, told, tmp_path):
    path = tmp_path / "x.log"
    path.write_text(log)
    service = ServerProcess("registry_service", [], "127.0.0.1:1", REGISTRY_SERVICE, path)
    assert service.last_words() == told.replace("LOG", str(path))
