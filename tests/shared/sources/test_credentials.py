"""Secrets are found where the configuration says, when they are used, and are shown nowhere."""

from pathlib import Path
from typing import Any

import pytest

from shared.config import ConfigError, load
from shared.errors import SourceUnavailable
from shared.sources.credentials import Credential

FIELDS: dict[str, Any] = {"scheme": "hf", "namespaces": ("a",), "prefixes": ("hf://org/",)}


def test_a_secret_is_read_when_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    in_file, in_env = Credential(secret=f"file:{file}", **FIELDS), Credential(secret="env:MY_TOKEN", **FIELDS)
    for credential in (in_file, in_env):
        with pytest.raises(SourceUnavailable, match=r"the credential's secret is not here: .*(secret|MY_TOKEN)"):
            credential.reveal()
    for text in ("first", "rotated"):
        file.write_text(f"{text}\n")
        monkeypatch.setenv("MY_TOKEN", text)
        assert in_file.reveal() == in_env.reveal() == text
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SourceUnavailable, match="no text"):
        in_file.reveal()
    assert Credential(secret="value:x:y", **FIELDS).reveal() == "x:y"
    assert Credential(secret="none", **FIELDS).reveal() == ""
    assert Credential(secret="default", **FIELDS).reveal("session_token") == ""


def test_no_secret_is_shown() -> None:
    credential = Credential(secret="value:TOPSECRET", key_id="value:KEYID", session_token="value:SESSION", **FIELDS)
    for word in ("TOPSECRET", "KEYID", "SESSION"):
        assert word not in repr(credential)
        assert word not in f"{credential}"
        assert word not in repr({"x": credential})


def test_tables_of_the_configuration(tmp_path: Path) -> None:
    from registry_service.config import RegistryConfig

    def read(text: str) -> RegistryConfig:
        (tmp_path / "c.toml").write_text(text)
        return load(RegistryConfig, toml=tmp_path / "c.toml", env={}, prefix="X_", flags={})

    text = """
        allowed_sources = ["a=hf://org/", "file://main/"]
        [credentials.hub]
        scheme = "hf"
        secret = "env:HUB_TOKEN"
        namespaces = ["a", "b"]
        prefixes = ["hf://org/"]
        endpoint = "https://hub.example.com"
    """
    found = read(text).credentials
    assert found == {
        "hub": Credential("hf", "env:HUB_TOKEN", ("a", "b"), ("hf://org/",), endpoint="https://hub.example.com")
    }
    wrong = """
        allowed_sources = ["nothing"]
        allowed_endpoints = ["ftp://x"]
        [credentials.hub]
        scheme = "HF"
        secret = "hf_PASTEDTOKEN"
        namespaces = []
        prefixes = ["org/"]
        key_id = 7
        colour = "blue"
        [credentials.other]
        scheme = "s3"
    """
    with pytest.raises(ConfigError) as caught:
        read(wrong)
    said = str(caught.value)
    for key in (
        "allowed_sources",
        "allowed_endpoints",
        "credentials.hub.scheme",
        "credentials.hub.secret",
        "credentials.hub.namespaces",
        "credentials.hub.prefixes",
        "credentials.hub.key_id",
        "credentials.hub.colour",
        "credentials.other.secret",
        "credentials.other.prefixes",
    ):
        assert key in said
    assert "PASTEDTOKEN" not in said
    for given in ("credentials = 3", "[credentials]\nhub = 3"):
        with pytest.raises(ConfigError, match="expected"):
            read(given)
    with pytest.raises(ConfigError, match="expected tables in the TOML file"):
        load(RegistryConfig, toml=None, env={"X_CREDENTIALS": "a=b"}, prefix="X_", flags={})
