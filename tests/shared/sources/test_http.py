"""The guarded client: what a URI of a stranger cannot make it open."""

import ipaddress
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import LoraplexError, SourceForbidden, SourceUnavailable
from shared.sources.http import GuardedClient, is_public
from shared.sources.policy import SourcePolicy
from shared.sources.remote import Body
from tests.shared.sources.fault_proxy import Fault, FaultProxy
from tests.shared.sources.stores import IMPATIENT, WebStore


def client(*endpoints: str, allowed: tuple[str, ...] = ()) -> GuardedClient:
    policy = SourcePolicy({}, endpoints=endpoints, allowed=allowed, patience=IMPATIENT)
    return GuardedClient(policy.access(None, "default", threading.Event()))


def content(body: Body) -> bytes:
    found = b"".join(iter(lambda: body.read(1000), b""))
    body.close()
    return found


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "224.0.0.1", "255.255.255.255", "192.0.2.1", "::", "::1", "fe80::1", "fc00::1", "ff02::1", "::ffff:10.0.0.1",
        "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:db8::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@given(st.ip_addresses(v=4))
def test_an_address_inside_another_is_as_public_as_itself(inner: ipaddress.IPv4Address) -> None:
    mapped = ipaddress.ip_address(f"::ffff:{inner}")
    nat64 = ipaddress.IPv6Address(int(ipaddress.ip_address("64:ff9b::")) | int(inner))
    assert is_public(mapped) == is_public(nat64) == is_public(inner)
    assert not (is_public(inner) and (inner.is_private or inner.is_loopback or inner.is_link_local))


def test_public_addresses() -> None:
    assert all(is_public(ipaddress.ip_address(text)) for text in ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"))


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1:{port}/x",
        "https://localhost:{port}/x",
        "https://[::1]:{port}/x",
        "https://2130706433:{port}/x",
        "https://127.1:{port}/x",
        "https://0x7f.0.0.1:{port}/x",
        "https://169.254.169.254/latest/meta-data/",
        "http://8.8.8.8/x",
        "ftp://8.8.8.8/x",
        "https://user@8.8.8.8/x",
        "https://8.8.8.8:99999/x",
        "https:///x",
        "https://8.8.8.8/a b",
        "https://8.8.8.8/a\r\nHost: x",
    ],
)
def test_urls_that_are_not_opened(web: WebStore, url: str) -> None:
    with pytest.raises(SourceForbidden):
        client().get(url.format(port=web.proxy.port), 0, 10)
    assert web.proxy.seen == []


def test_a_name_is_looked_up_once_and_every_address_of_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up, connected = [], []
    answers = [["8.8.8.8", "10.0.0.1"], ["::ffff:10.0.0.1"], ["8.8.8.8"], ["127.0.0.1"]]

    def addresses(host: str, port: int, **names: object) -> list[tuple[object, ...]]:
        looked_up.append(host)
        return [(0, 0, 0, "", (address, port)) for address in answers[len(looked_up) - 1]]

    def connect(address: tuple[str, int], timeout: float) -> None:
        connected.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    monkeypatch.setattr(socket, "create_connection", connect)
    for expected in (SourceForbidden, SourceForbidden, SourceUnavailable):
        with pytest.raises(expected):
            client().get("https://rebinding.example/x", 0, 10)
    assert looked_up == ["rebinding.example"] * 3
    assert connected == [("8.8.8.8", 443)]  # not what a second look-up would say


def test_an_endpoint_is_a_scheme_a_host_and_a_port(web: WebStore) -> None:
    url = web.put("a", {"x": b"0123456789"}) + "x"
    assert content(client(web.proxy.url).get(url, 2, 5)) == b"234"
    for endpoint in (
        f"http://127.0.0.1:{web.proxy.port}",
        "https://127.0.0.1:1",
        f"https://localhost:{web.proxy.port}",
    ):
        with pytest.raises(SourceForbidden, match="not public"):
            client(endpoint).get(url, 0, 10)


def test_redirects_are_judged_like_the_first_url(web: WebStore) -> None:
    plain = FaultProxy(web.proxy.url.replace("https", "http"))
    url = web.put("a", {"x": b"0123456789"}) + "x"
    inside = web.put("b", {"y": b"inside"}) + "y"
    for location, endpoints, allowed, error in [
        ("http://169.254.169.254/latest", (), (), SourceForbidden),
        (f"{plain.url}/x", (), (), SourceForbidden),
        ("https://10.0.0.1/x", (), (), SourceForbidden),
        ("file:///etc/passwd", (), (), SourceForbidden),
        ("", (), (), SourceForbidden),  # to itself, for ever
        (inside, (), (f"{web.proxy.url}/a/",), SourceForbidden),
    ]:
        web.proxy.faults[:] = [Fault("/a/x", status=302, headers=(("Location", location),))]
        with pytest.raises(error) as caught:
            client(web.proxy.url, *endpoints, allowed=allowed).get(url, 0, 10)
        assert "Signature" not in caught.value.message
    assert plain.seen == []
    web.proxy.faults[:] = [Fault("/a/x", status=307, headers=(("Location", "/b/y"),))]
    assert content(client(web.proxy.url).get(url, 0, 6)) == b"inside"
    plain.close()


def test_a_token_goes_to_its_own_server_only(web: WebStore, tmp_path: Path) -> None:
    other = FaultProxy(f"http://127.0.0.1:{web.web.server_address[1]}")
    url = web.put("a", {"x": b"0123456789"}) + "x"
    web.proxy.faults[:] = [Fault("/a/x", status=302, headers=(("Location", f"{other.url}/a/x"),))]
    token = {"Authorization": "Bearer t"}
    assert content(client(web.proxy.url, other.url).get(url, 0, 10, headers=token)) == b"0123456789"
    assert web.proxy.seen[-1].headers["authorization"] == "Bearer t"
    assert "authorization" not in other.seen[-1].headers
    other.close()


def test_certificates_are_checked(web: WebStore, monkeypatch: pytest.MonkeyPatch) -> None:
    url = web.put("a", {"x": b"0123456789"}) + "x"
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(SourceForbidden, match="certificate is not valid"):
        client(web.proxy.url).get(url, 0, 10)


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ((), SourceForbidden),
        ((("Content-Range", "bytes 0-9/*"),), SourceForbidden),
        ((("Content-Range", "bytes 9-0/10"),), SourceForbidden),
        ((("Content-Range", "bytes 0-99/10"),), SourceForbidden),
        ((("Content-Range", "bytes 0-9/10"), ("Content-Encoding", "gzip")), SourceForbidden),
    ],
)
def test_answers_that_do_not_tell_their_size(
    web: WebStore, headers: tuple[tuple[str, str], ...], error: type[LoraplexError]
) -> None:
    url = web.put("a", {"x": b"0123456789"}) + "x"
    web.proxy.faults[:] = [Fault(status=206, headers=headers)]
    with pytest.raises(error, match="how many bytes"):
        client(web.proxy.url).get(url, 0, 10)


def test_what_is_no_http(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(SourceUnavailable):
            client(f"http://127.0.0.1:{port}").get(f"http://127.0.0.1:{port}/x", 0, 10)
    with pytest.raises(SourceUnavailable, match="no address"):
        client().get("https://nosuchhost.invalid/x", 0, 10)
