"""Ports that are free, taken and shared, and what a server says of them."""

import socket

import pytest

from examples.stack import free_address
from shared.errors import InvalidArgument
from shared.grpc_server import create_server
from shared.listening import check_listen, check_ports


@pytest.fixture
def taken():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_free_addresses():
    for listen in ("127.0.0.1:0", "0.0.0.0:0", "localhost:0", "unix:/no/such/socket"):
        check_listen(listen)


def test_a_probe_leaves_the_port_free():
    address = free_address()
    for _ in range(3):
        check_listen(address)


@pytest.mark.parametrize("reuse_port", [False, True])
def test_a_taken_port(taken, reuse_port):
    with pytest.raises(InvalidArgument) as caught:
        check_listen(f"127.0.0.1:{taken}", reuse_port=reuse_port)
    assert caught.value.message == f"listen: cannot listen on 127.0.0.1:{taken}: address already in use"
    with pytest.raises(InvalidArgument):  # not only ::1
        check_listen(f"localhost:{taken}", reuse_port=reuse_port)


def test_a_port_may_be_shared_by_those_who_agree():
    with socket.socket() as sharing:
        sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sharing.bind(("127.0.0.1", 0))
        sharing.listen()
        port = sharing.getsockname()[1]
        check_listen(f"127.0.0.1:{port}", reuse_port=True)
        with pytest.raises(InvalidArgument):
            check_listen(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("listen", "reason"), [("192.0.2.1:5", "cannot assign"), ("no.such.invalid:5", ""), ("127.0.0.1:x", "number")]
)
def test_addresses_that_are_not_ours(listen, reason):
    with pytest.raises(InvalidArgument, match=f"cannot listen on {listen}: .*{reason}") as caught:
        check_listen(listen)
    assert caught.value.violations[0].field == "listen"


async def test_grpc_writes_nothing_about_a_taken_port(taken, capfd):
    with pytest.raises(InvalidArgument, match="address already in use"):
        await create_server(f"127.0.0.1:{taken}", lambda server: None, [])
    assert capfd.readouterr().err == ""


def test_all_ports_of_a_service(taken):
    check_ports({"listen": "127.0.0.1:0", "health_listen": "127.0.0.1:0", "metrics_listen": ""})
    with pytest.raises(InvalidArgument) as caught:
        check_ports({"listen": "127.0.0.1:0", "health_listen": "", "metrics_listen": f"127.0.0.1:{taken}"})
    assert caught.value.message == f"metrics_listen: cannot listen on 127.0.0.1:{taken}: address already in use"


@pytest.mark.parametrize(
    ("one", "other", "is_one"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("127.0.0.1", "0.0.0.0", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "127.0.0.2", False),
    ],
)
@pytest.mark.parametrize("sharing", [(), ("listen", "health_listen")])
def test_two_settings_cannot_have_one_port(one, other, is_one, sharing):
    port = free_address().rpartition(":")[2]
    listens = {"listen": f"{one}:{port}", "health_listen": f"{other}:{port}"}
    if not is_one:
        return check_ports(listens, sharing)
    with pytest.raises(InvalidArgument) as caught:
        check_ports(listens, sharing)
    assert caught.value.message == f"health_listen: cannot listen on {other}:{port}: listen has that port"
    return None
