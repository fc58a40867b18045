import os
import threading
from pathlib import Path

import pytest

from shared.errors import InvalidArgument, SourceForbidden, SourceNotFound
from shared.sources import resolver
from shared.sources.policy import SourcePolicy
from shared.sources.resolver import PinnedSource


def open_source(uri, roots, allowed=(), namespace="default"):
    policy = SourcePolicy(roots, allowed=allowed)
    return resolver.open_source(PinnedSource(uri), namespace, policy, threading.Event())


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root" / "deep" / "adapter"
    folder.mkdir(parents=True)
    (folder / "b.txt").write_bytes(b"hello")
    (folder / "a.txt").write_bytes(b"")
    (folder / "sub").mkdir()
    return tmp_path / "root"


def test_a_folder_is_listed_and_read(root):
    source = open_source("file://main/deep/adapter", {"main": root})
    assert source.list() == ["a.txt", "b.txt"]
    assert open_source("file://main", {"main": root}).folders() == ("deep",)
    with source.open("b.txt") as file:
        assert file.size == 5
        assert file.read(3) == b"hel"
        assert file.read(3) == b"lo"
        assert file.read(3) == b""
        assert file.is_unchanged()
        (root / "deep" / "adapter" / "b.txt").write_bytes(b"longer")
        assert not file.is_unchanged()
    assert source.pin().uri == "file://main/deep/adapter"
    assert source.pin().revision == ""


@pytest.mark.parametrize("uri", ["file://main", "file://main/", "file://main//deep/../", "file:///"])
def test_roots_themselves(root, uri):
    roots = {"main": root / "deep" / "adapter", "all": Path("/")}
    if ".." in uri:
        with pytest.raises(SourceForbidden):
            open_source(uri, roots)
    else:
        expected = "file://all/" if uri == "file:///" else "file://main/"
        assert open_source(uri, roots).pin().uri == expected


def test_an_absolute_path_belongs_to_the_nearest_root(root):
    roots = {"outer": root, "inner": root / "deep"}
    assert open_source(f"file://{root}/deep/adapter", roots).pin().uri == "file://inner/adapter"
    assert open_source("file://outer/deep/adapter", roots).pin().uri == "file://outer/deep/adapter"


def test_any_file_name_survives_pinning(root):
    folder = os.fsencode(root) + b"/\xff %?#\xc3\xa9"
    os.mkdir(folder)  # noqa: PTH102  # a name that is no text
    uri = "file://main/%FF%20%25%3F%23%C3%A9"
    assert open_source(uri, {"main": root}).pin().uri == uri
    assert open_source("file://main/%FF %25?#é", {"main": root}).pin().uri == uri


def test_each_refusal_says_what_to_do(root, tmp_path):
    os.mkfifo(root / "deep" / "adapter" / "fifo")
    (tmp_path / "secret").write_bytes(b"")
    (root / "deep" / "adapter" / "link").symlink_to(tmp_path / "secret")
    for uri, name, said in [
        ("file://main/deep/adapter", "fifo", "fifo is not a regular file; put the file itself there"),
        ("file://main/deep/adapter", "link", "link is a symbolic link that leaves the file root; put the file itself "),
        ("file://main/deep/adapter", "no", "does not exist; correct the URI, or restore what it names"),
        ("file://main/no", "", "file://main/no does not exist; correct the URI, or restore what it names"),
        ("file://main/a/../b", "", "may not contain '..'; write the path without it"),
        ("file://other/a", "", "no file root is called 'other'; write file://ROOT/path with one of the roots main"),
        ("file:///etc", "", "below one of the file roots; write file://ROOT/path with one of the roots main"),
    ]:
        with pytest.raises((SourceForbidden, SourceNotFound)) as caught:
            open_source(uri, {"main": root}).open(name)
        assert said in caught.value.message
    with pytest.raises(SourceForbidden, match="; start the service with --file-root NAME=DIR"):
        open_source("file://other/a", {})


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "sub/x", "/etc/passwd", "a\0"])
def test_names_that_are_no_plain_files(root, name):
    source = open_source("file://main/deep/adapter", {"main": root})
    with pytest.raises(SourceForbidden):
        source.open(name)


def test_what_is_not_there_or_no_file(root):
    source = open_source("file://main/deep/adapter", {"main": root})
    with pytest.raises(SourceNotFound) as caught:
        source.open("c.txt")
    assert caught.value.metadata == {"uri": "file://main/deep/adapter", "file": "c.txt"}
    with pytest.raises(SourceForbidden):
        source.open("sub")


def test_a_link_swapped_in_after_the_check(root, tmp_path, monkeypatch):
    """What was opened is looked at once more."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "b.txt").write_bytes(b"secret")
    source = open_source("file://main/deep/adapter", {"main": root})
    real = os.path.realpath

    def swap(path, **names):
        found = real(path, **names)
        (root / "deep" / "adapter").rename(root / "deep" / "old")
        (root / "deep" / "adapter").symlink_to(secret)
        return found

    monkeypatch.setattr(os.path, "realpath", swap)
    with pytest.raises(SourceForbidden):
        source.open("b.txt")


def test_unknown_schemes(root):
    with pytest.raises(InvalidArgument, match="file"):
        open_source("gopher://x/y", {"main": root})


def test_odd_entries_are_no_reason_to_fail(root):
    folder = root / "deep" / "adapter"
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    (folder / os.fsdecode(b"\xff.txt")).touch()
    source = open_source("file://main/deep/adapter", {"main": root})
    assert source.list() == ["a.txt", "b.txt", "dangling", "loop"]
    for name in ("loop", "dangling"):
        with pytest.raises(SourceNotFound):
            source.open(name)


def test_a_symbolic_link_does_not_lead_to_another_namespaces_folder(root):
    (root / "theirs").mkdir()
    (root / "theirs" / "w").write_bytes(b"secret")
    (root / "deep" / "adapter" / "w").symlink_to(root / "theirs" / "w")
    (root / "deep" / "link").symlink_to(root / "theirs")
    allowed = ("mine=file://main/deep", "other=file://main/theirs/")
    source = open_source("file://main/deep/adapter", {"main": root}, allowed, "mine")
    with source.open("b.txt") as file:
        assert file.read(9) == b"hello"
    with pytest.raises(SourceForbidden):
        source.open("w")
    for uri in ("file://main/theirs", "file://main/deep/link", f"file://{root}/deep/adapter", "file://main/deeper"):
        with pytest.raises(SourceForbidden):
            open_source(uri, {"main": root}, allowed, "mine")
    with open_source("file://main/theirs", {"main": root}, allowed, "other").open("w") as file:
        assert file.read(9) == b"secret"
