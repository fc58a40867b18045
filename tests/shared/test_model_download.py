"""Base models of a Hub: what is downloaded, and that each failure is told for what it is."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from shared.errors import FailedPrecondition, InvalidArgument, LoraplexError, SourceForbidden, SourceUnavailable
from shared.model_folder import resolve_model
from tests.shared.sources.fault_proxy import Fault, FaultProxy
from tests.shared.sources.hub_server import TOKEN, HubServer, Repo

FILES = {"config.json": b"{}", "model.safetensors": b"1", "original/x.json": b"{}", "pytorch_model.bin": b"2"}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    server = HubServer()
    server.repos["org/model"] = Repo()
    server.repos["org/model"].commit(FILES)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    files = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield server
    server.close()


def refused(error: type[LoraplexError], name: str = "org/model") -> str:
    """The whole message."""
    with pytest.raises(error) as caught:
        resolve_model(name)
    assert type(caught.value) is error
    if error is not InvalidArgument:
        assert caught.value.metadata == {"model": name}
    return caught.value.message


def test_only_what_is_read_is_downloaded(server: HubServer) -> None:
    without = resolve_model("org/model", with_weights=False)
    assert sorted(path.name for path in without.iterdir()) == ["config.json"]
    assert sorted(path.name for path in resolve_model("org/model").iterdir()) == ["config.json", "model.safetensors"]


def test_a_copy_is_used_while_the_hub_is_down(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve_model("org/model")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model("org/model") == folder


def test_what_the_hub_does_not_have_or_does_not_show(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repos["org/empty"] = Repo()
    server.repos["org/gated"] = Repo(is_gated=True)
    server.repos["org/private"] = Repo(is_private=True)
    assert "no such folder here, and no such repository" in refused(InvalidArgument, "org/nosuch")
    assert "set HF_TOKEN" in refused(InvalidArgument, "org/private")
    assert "no branch main" in refused(InvalidArgument, "org/empty")
    assert "no name on the Hub" in refused(InvalidArgument, "org/na--me")
    server.repos["org/gated"].commit(FILES)
    assert "accept its terms" in refused(SourceForbidden, "org/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "HTTP 401" in refused(SourceForbidden)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.repos["org/model"].is_disabled = True
    assert "HTTP 403" in refused(SourceForbidden)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_has_no_answer_now(server: HubServer, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    proxy = FaultProxy(server.url)
    proxy.faults.append(Fault("/api/", status=status))
    monkeypatch.setattr(constants, "ENDPOINT", proxy.url)
    assert f"HTTP {status}" in refused(SourceUnavailable)
    proxy.close()


def test_a_hub_that_cannot_be_reached(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "not reachable: ConnectError" in refused(SourceUnavailable)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids" in refused(SourceUnavailable)


def test_a_cache_that_cannot_be_written(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "cache"))
    said = refused(FailedPrecondition)
    assert f"cannot be kept in {tmp_path}/file/cache: Not a directory; make room, or let HF_HOME" in said


@pytest.mark.parametrize(
    "full", [OSError(28, "No space left on device"), RuntimeError("Data processing error: x (os error 28)")]
)
def test_a_disk_that_is_full(server: HubServer, monkeypatch: pytest.MonkeyPatch, full: Exception) -> None:
    def download(*_: object, **__: object) -> str:
        raise full

    monkeypatch.setattr("shared.model_download.snapshot_download", download)
    assert "No space left on device" in refused(FailedPrecondition)


def test_a_download_that_breaks_off(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise RuntimeError("Data processing error: connection refused (os error 111)")

    monkeypatch.setattr("shared.model_download.snapshot_download", download)
    assert "not reachable: RuntimeError" in refused(SourceUnavailable)
