"""The Hub's own ways: revisions, folders, gates, tokens, limits and redirects, with the real client."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from shared.errors import InvalidArgument, LoraplexError, SourceForbidden, SourceNotFound, SourceUnavailable
from shared.sources.credentials import Credential
from shared.sources.policy import SourcePolicy
from shared.sources.resolver import PinnedSource, Source, open_source
from tests.shared.sources.fault_proxy import Fault, FaultProxy
from tests.shared.sources.hub_server import TOKEN, HubServer, Repo
from tests.shared.sources.stores import IMPATIENT, HubStore

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(5000), "sub/dir/adapter_config.json": b"[]"}


@pytest.fixture
def server() -> Iterator[HubServer]:
    server = HubServer()
    server.repos["org/repo"] = Repo()
    yield server
    server.close()


def opened(server: HubServer, uri: str, secret: str = "none", revision: str = "", url: str = "") -> Source:
    credential = Credential("hf", secret, ("*",), ("hf://",), endpoint=url or server.url)
    policy = SourcePolicy({}, {"c": credential}, patience=IMPATIENT)
    return open_source(PinnedSource(uri, revision, credential_ref="c"), "default", policy, threading.Event())


def content(source: Source, name: str) -> bytes:
    with source.open(name) as file:
        return file.read(10_000)


def test_a_branch_is_pinned_to_its_commit(server: HubServer) -> None:
    old = server.repos["org/repo"].commit(FILES)
    pinned = opened(server, "hf://org/repo").pin()
    assert pinned == ("hf://org/repo", old, (), "c")
    new = server.repos["org/repo"].commit({**FILES, "adapter_config.json": b'{"new": 1}'})
    assert opened(server, "hf://org/repo").pin().revision == new
    num_calls = len(server.api_calls)
    assert content(opened(server, pinned.uri, revision=old), "adapter_config.json") == b"{}"
    assert len(server.api_calls) == num_calls  # what is pinned needs no look-up


@pytest.mark.parametrize("revision", ["v1.0", "refs%2Fpr%2F1", "a%2Fb%20c", ""])
def test_revisions(server: HubServer, revision: str) -> None:
    server.repos["org/repo"].commit({"other": b""})
    ref = revision.replace("%2F", "/").replace("%20", " ")
    sha = server.repos["org/repo"].commit(FILES, ref or "main")
    uri = f"hf://org/repo@{revision}/sub/dir" if revision else f"hf://org/repo@{sha}/sub/dir"
    source = opened(server, uri)
    assert source.pin().revision == sha
    assert source.pin().uri == "hf://org/repo/sub/dir"
    assert source.list() == ["adapter_config.json"]
    assert content(source, "adapter_config.json") == b"[]"


def test_files_below_the_folder_are_listed_too(server: HubServer) -> None:
    server.repos["org/repo"].commit(FILES)
    assert "sub/dir/adapter_config.json" in opened(server, "hf://org/repo").list()
    assert "sub" in opened(server, "hf://org/repo").folders()
    assert opened(server, "hf://org/repo/sub").folders() == ("dir",)
    with pytest.raises(SourceNotFound, match="nosuch"):
        opened(server, "hf://org/repo/nosuch").list()


@pytest.mark.parametrize(
    ("uri", "error"),
    [
        ("hf://", InvalidArgument),
        ("hf://repo", InvalidArgument),
        ("hf://org/", InvalidArgument),
        ("hf://org/repo@", InvalidArgument),
        ("hf://org/re po", InvalidArgument),
        ("hf://org/repo?x", InvalidArgument),
        ("hf://org/repo@a%00b", InvalidArgument),
        ("hf://org/..", SourceForbidden),
        ("hf://org/repo/../x", SourceForbidden),
        ("hf://org/repo/%2e%2e/x", SourceForbidden),
        ("hf://org/repo/a%2Fb", SourceForbidden),
    ],
)
def test_uris_that_name_nothing(server: HubServer, uri: str, error: type[LoraplexError]) -> None:
    policy = SourcePolicy({})
    with pytest.raises(error):
        open_source(PinnedSource(uri), "default", policy, threading.Event())
    assert server.api_calls == []


def test_what_is_missing_and_what_is_closed_are_told_apart(server: HubServer) -> None:
    repo = server.repos["org/repo"]
    repo.commit(FILES)
    server.repos["org/private"] = Repo(is_private=True)
    server.repos["org/private"].commit(FILES)
    server.repos["org/gated"] = Repo(is_gated=True)
    server.repos["org/gated"].commit(FILES)
    server.repos["org/empty"] = Repo()
    server.repos["org/disabled"] = Repo(is_disabled=True)
    good = f"value:{TOKEN}"
    for uri, secret, error, said in [
        ("hf://org/nosuch", "none", SourceNotFound, "does not exist, or it is private"),
        ("hf://org/nosuch", good, SourceNotFound, "does not exist, or it is private"),
        ("hf://org/private", "none", SourceNotFound, "does not exist, or it is private"),
        ("hf://org/repo@nosuch", "none", SourceNotFound, "no revision nosuch; name a branch"),
        (
            "hf://org/repo@feat/y",
            "none",
            SourceNotFound,
            "no revision feat; .* write its / as %2F: hf://org/repo@feat%2Fy",
        ),
        ("hf://org/empty", "none", SourceNotFound, "has no branch main; name .*: hf://org/empty@REVISION"),
        ("hf://org/disabled", good, SourceForbidden, "403"),
        ("hf://org/repo", "value:hf_wrong", SourceForbidden, "401"),
    ]:
        with pytest.raises(error, match=said) as caught:
            opened(server, uri, secret)
        assert caught.value.metadata["uri"] == uri
        assert "hf_" not in str(caught.value.record())
    assert content(opened(server, "hf://org/private", good), "adapter_config.json") == b"{}"
    with pytest.raises(SourceForbidden, match="gated"):
        opened(server, "hf://org/gated").open("adapter_config.json")
    assert content(opened(server, "hf://org/gated", good), "adapter_config.json") == b"{}"
    with pytest.raises(SourceNotFound) as caught:
        opened(server, "hf://org/repo").open("nosuch.txt")
    assert caught.value.metadata == {"uri": "hf://org/repo", "file": "nosuch.txt"}
    with pytest.raises(SourceNotFound, match=r"no revision 0{40} any more; restore"):
        opened(server, "hf://org/repo", revision="0" * 40).open("adapter_config.json")


def test_the_token_does_not_leave_the_hub(server: HubServer) -> None:
    server.repos["org/repo"].commit(FILES)
    source = opened(server, "hf://org/repo", f"value:{TOKEN}")
    assert content(source, "adapter_model.safetensors") == bytes(5000)
    assert server.store_headers
    assert all("authorization" not in headers for headers in server.store_headers)


def test_a_repository_that_moved_is_followed(server: HubServer) -> None:
    server.repos["org/repo"].commit(FILES)
    server.moved["org/old"] = "org/repo"
    assert opened(server, "hf://org/old").pin().revision == server.repos["org/repo"].refs["main"]


def test_limits_are_told_with_their_end(server: HubServer) -> None:
    server.repos["org/repo"].commit(FILES)
    proxy = FaultProxy(server.url)
    limits = (("ratelimit", '"api";r=0;t=55'), ("ratelimit-policy", '"fixed window";"api";q=500;w=300'))
    proxy.faults.append(Fault("/api/", status=429, headers=limits))
    with pytest.raises(SourceUnavailable) as caught:
        opened(server, "hf://org/repo", url=proxy.url)
    assert caught.value.retry_after == 55
    assert len(proxy.seen) == 1
    proxy.faults[:] = [Fault("/api/", times=2, status=502)]
    assert opened(server, "hf://org/repo", url=proxy.url).list()
    proxy.faults[:] = [Fault("/api/", after=20, ending="close")]
    with pytest.raises(SourceUnavailable):
        opened(server, "hf://org/repo", url=proxy.url)
    proxy.faults[:] = [Fault("/api/", flip=True)]
    with pytest.raises(SourceUnavailable, match="malformed"):
        opened(server, "hf://org/repo", url=proxy.url)
    proxy.close()


def test_the_librarys_own_variables_count_without_a_credential(server: HubServer) -> None:
    server.repos["org/repo"].is_private = True
    server.repos["org/repo"].commit(FILES)
    code = (
        "import threading; from shared.sources.policy import SourcePolicy\n"
        "from shared.sources.resolver import PinnedSource, open_source\n"
        "source = open_source(PinnedSource('hf://org/repo'), 'default', SourcePolicy({}), threading.Event())\n"
        "print(source.pin().revision)"
    )
    env = {**os.environ, "HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == server.repos["org/repo"].refs["main"]


def test_no_log_has_a_token_or_a_signature(hub: HubStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    uri = hub.put("a", {**FILES, "adapter_model.safetensors": bytes(500_000)})
    hub.fault(Fault(times=1, after=1000))
    source = opened(hub.hub, uri, f"value:{TOKEN}")
    with source.open("adapter_model.safetensors") as file:
        assert sum(map(len, iter(lambda: file.read(100_000), b""))) == 500_000
    hub.fault(Fault(status=500))
    with pytest.raises(SourceUnavailable):
        opened(hub.hub, uri, f"value:{TOKEN}", url=hub.proxy.url).open("adapter_config.json")
    assert TOKEN not in caplog.text
    assert "SECRETSIGNATURE" not in caplog.text
