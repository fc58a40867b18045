"""S3's own ways: logins, buckets and prefixes, with the real client against a real server."""

import threading
from io import BytesIO
from pathlib import Path

import pytest
from boto3.s3.transfer import TransferConfig

from shared.errors import (
    DigestMismatch,
    InvalidArgument,
    LoraplexError,
    SourceForbidden,
    SourceNotFound,
    SourceUnavailable,
)
from shared.sources.credentials import Credential
from shared.sources.policy import SourcePolicy
from shared.sources.resolver import PinnedSource, RangedSource, Source, SourceFile, open_source
from tests.shared.sources.fault_proxy import Fault
from tests.shared.sources.stores import IMPATIENT, SECRET, S3Store

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(5000)}


def opened(s3: S3Store, uri: str, secret: str, **fields: str) -> Source:
    credential = Credential("s3", secret, ("*",), ("s3://",), endpoint=s3.proxy.url, **fields)
    policy = SourcePolicy({}, {"c": credential}, patience=IMPATIENT)
    return open_source(PinnedSource(uri, credential_ref="c"), "default", policy, threading.Event())


def read(file: SourceFile) -> bytes:
    with file:
        return b"".join(iter(lambda: file.read(1 << 20), b""))


def authorizations(s3: S3Store) -> list[str]:
    return [seen.headers.get("authorization", "") for seen in s3.proxy.seen]


def test_only_objects_right_below_the_prefix_belong_to_the_folder(s3: S3Store) -> None:
    uri = s3.put("a", {**FILES, "deeper/file": b""})
    s3.put("ab", {"other": b""})
    source = s3.open(s3.pinned(uri + "/"))
    assert source.list() == sorted(FILES)
    assert source.folders() == ("deeper",)
    assert s3.open(s3.pinned(f"s3://{s3.bucket}/adapters")).list() == []
    assert s3.open(s3.pinned(f"s3://{s3.bucket}/adapters")).folders() == ("a", "ab")
    assert source.pin().uri == uri
    with pytest.raises(SourceNotFound):
        s3.open(s3.pinned(f"s3://{s3.bucket}/adapters/nosuch")).list()
    with pytest.raises(SourceNotFound):
        s3.open(s3.pinned("s3://nosuchbucket/a")).list()
    with pytest.raises(SourceNotFound) as caught:
        s3.open(s3.pinned(uri)).open("nosuch")
    assert caught.value.metadata == {"uri": uri, "file": "nosuch"}


def test_a_whole_bucket_is_a_folder(s3: S3Store) -> None:
    s3.client.put_object(Bucket=s3.bucket, Key="adapter_config.json", Body=b"{}")
    source = s3.open(s3.pinned(f"s3://{s3.bucket}"))
    assert source.list() == ["adapter_config.json"]
    assert source.pin().uri == f"s3://{s3.bucket}"


def test_an_object_that_was_uploaded_in_parts(s3: S3Store) -> None:
    """Its ETag is no hash of its content, and pins it all the same."""
    content = bytes(range(256)) * (24 << 10)  # 6 MiB: parts but the last have 5 at least
    in_parts = TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=5 << 20, use_threads=False)
    s3.client.upload_fileobj(BytesIO(content), s3.bucket, "adapters/a/w", Config=in_parts)
    source = s3.open(s3.pinned(f"s3://{s3.bucket}/adapters/a"))
    assert read(source.open("w")) == content
    pinned = source.pin()
    assert pinned.objects[0].etag.endswith('-2"')
    border = 5 << 20
    assert isinstance(source, RangedSource)
    assert read(source.open_range("w", border - 10, border + 10)) == content[border - 10 : border + 10]
    s3.client.put_object(Bucket=s3.bucket, Key="adapters/a/w", Body=content[::-1])
    with pytest.raises(DigestMismatch):
        s3.open(pinned).open("w")


@pytest.mark.parametrize(
    ("uri", "error"),
    [
        ("s3://", InvalidArgument),
        ("s3://B/a", InvalidArgument),
        ("s3://a..b/c", InvalidArgument),
        ("s3://arn:aws:s3:::bucket/a", InvalidArgument),
        ("s3://bucket/a/../b", SourceForbidden),
        ("s3://bucket/a//b", SourceForbidden),
    ],
)
def test_uris_that_name_nothing(uri: str, error: type[LoraplexError]) -> None:
    with pytest.raises(error):
        open_source(PinnedSource(uri), "default", SourcePolicy({}), threading.Event())


def test_requests_are_signed_with_the_credential(s3: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = s3.put("a", FILES)
    monkeypatch.setenv("MY_SECRET", SECRET)
    assert opened(s3, uri, "env:MY_SECRET", key_id="value:AKIAMINE", region="eu-west-1").list()
    assert all("AKIAMINE" in text and "eu-west-1" in text for text in authorizations(s3))
    with pytest.raises(SourceForbidden, match="key_id"):
        opened(s3, uri, "env:MY_SECRET")
    monkeypatch.delenv("MY_SECRET")
    with pytest.raises(SourceUnavailable, match="variable MY_SECRET is not set"):
        opened(s3, uri, "env:MY_SECRET", key_id="value:AKIAMINE")


def test_anonymous_requests_are_not_signed(s3: S3Store) -> None:
    uri = s3.put("a", FILES)
    assert opened(s3, uri, "none").list()
    assert set(authorizations(s3)) == {""}


@pytest.fixture
def own_chain(s3: S3Store, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Variables without any login in them."""
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_CONTAINER_CREDENTIALS_FULL_URI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "AWS_ENDPOINT_URL_S3": s3.proxy.url,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def without_credential(uri: str, read_seconds: float) -> Source:
    """Clients are kept by their settings, so a read limit of its own gives a test a new one."""
    policy = SourcePolicy({}, patience=IMPATIENT._replace(read=read_seconds))
    return open_source(PinnedSource(uri), "default", policy, threading.Event())


def test_boto3s_own_variables_count_without_a_credential(s3: S3Store, own_chain: pytest.MonkeyPatch) -> None:
    uri = s3.put("a", FILES)
    own_chain.setenv("AWS_ACCESS_KEY_ID", "AKIACHAIN")
    own_chain.setenv("AWS_SECRET_ACCESS_KEY", "x")
    assert without_credential(uri, 1.5).list() == sorted(FILES)
    assert "AKIACHAIN" in authorizations(s3)[-1]


def test_the_role_of_a_service_account_counts_without_a_credential(
    s3: S3Store, own_chain: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    uri = s3.put("a", FILES)
    (tmp_path / "token").write_text("a.b.c")
    own_chain.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/replica")
    own_chain.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    own_chain.setenv("AWS_ENDPOINT_URL_STS", s3.url)
    own_chain.setenv("AWS_REGION", "us-east-1")
    assert without_credential(uri, 1.6).list() == sorted(FILES)
    assert s3.proxy.seen[-1].headers["x-amz-security-token"]


def test_a_machine_without_any_login_is_told_what_to_do(s3: S3Store, own_chain: pytest.MonkeyPatch) -> None:
    source = without_credential(s3.put("a", FILES), 1.7)
    with pytest.raises(SourceForbidden, match="no credentials"):
        source.list()


def test_no_log_has_a_secret_or_a_signature(s3: S3Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    uri = s3.put("a", FILES)
    source = opened(s3, uri, f"value:{SECRET}", key_id="value:AKIAMINE", session_token="value:MYSESSIONTOKEN")
    with source.open("adapter_model.safetensors") as file:
        assert file.size == 5000
    s3.fault(Fault(status=500))
    with pytest.raises(SourceUnavailable) as caught:
        source.open("adapter_config.json")
    assert "mysessiontoken" in str(s3.proxy.seen).lower()  # it was sent
    for text in (caplog.text, str(caught.value.record())):
        assert "Signature=" not in text
        assert SECRET not in text
        assert "MYSESSIONTOKEN" not in text
