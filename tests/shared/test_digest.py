import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.digest import FileEntry, check_digest, manifest_digest
from shared.errors import InvalidArgument

A = FileEntry("adapter_config.json", 3, "a" * 64)
B = FileEntry("adapter_model.safetensors", 5, "b" * 64)


def test_canonical_encoding():
    lines = f"loraplex-manifest-v1\n{A.sha256} 3 adapter_config.json\n{B.sha256} 5 adapter_model.safetensors\n"
    assert manifest_digest([B, A]) == "sha256:" + hashlib.sha256(lines.encode()).hexdigest()


@given(st.permutations([A, B, FileEntry("é", 0, "0" * 64)]))
def test_order_does_not_matter(files):
    assert manifest_digest(files) == manifest_digest(sorted(files))


@pytest.mark.parametrize("other", [B._replace(path="x"), B._replace(size=6), B._replace(sha256="c" * 64)])
def test_every_part_counts(other):
    assert manifest_digest([A, other]) != manifest_digest([A, B])


@pytest.mark.parametrize(
    ("files", "field"),
    [
        ([], "manifest.files"),
        ([A, A], "manifest.files"),
        ([A._replace(path="../x")], "manifest.files.path"),
        ([A._replace(path="/x")], "manifest.files.path"),
        ([A._replace(path="x\ny")], "manifest.files.path"),
        ([A._replace(path="\ud800")], "manifest.files.path"),
        ([A._replace(size=-1)], "manifest.files.size_bytes"),
        ([A._replace(sha256="A" * 64)], "manifest.files.sha256"),
    ],
)
def test_malformed_entries(files, field):
    with pytest.raises(InvalidArgument) as caught:
        manifest_digest(files)
    assert caught.value.violations[0].field == field


@pytest.mark.parametrize("text", ["", "sha256:", "sha256:" + "g" * 64, "sha256:" + "a" * 64 + "\n", "a" * 64])
def test_check_digest(text):
    assert check_digest("sha256:" + "a" * 64, "digest")
    with pytest.raises(InvalidArgument, match="digest"):
        check_digest(text, "digest")
