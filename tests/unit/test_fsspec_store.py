"""What is particular to stores that fsspec reaches; their contract is `test_store.py`."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem

from checkpointing.commit import start_attempt
from checkpointing.errors import ConfigError, StoreError
from checkpointing.store import open_store
from checkpointing.stores.fsspec_store import FsspecStore


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("fsspec+memory://", "give protocol and path"),
        ("fsspec+nonsense://a/b", "fsspec can't use 'nonsense'"),
        ("fsspec://a/b", "fsspec can't use 'fsspec'"),
    ],
)
def test_a_bad_url(url: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        open_store(url)


class Other(LocalFileSystem):  # type: ignore[misc]
    """A protocol of which nothing particular is known."""

    protocol = "other"


@pytest.mark.parametrize(("protocol", "kind"), [("file", LocalFileSystem), ("other", Other)])
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str, kind: type[LocalFileSystem]
) -> None:
    store = FsspecStore(kind(auto_mkdir=True), f"{protocol}://{tmp_path}/store")
    store.put("key", b"old")

    def fail(file: Any, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(LocalFileOpener, "write", fail, raising=False)
        with pytest.raises(StoreError, match=f"cannot write {protocol}://.*/store/key: OSError.*No space left"):
            store.put("key", b"new")
    assert store.get("key") == b"old"
    assert [file.name for file in (tmp_path / "store").iterdir()] == ["key"]


def test_a_local_value_is_never_moved_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be on another device, where moving is copying: readers would see half of it."""
    monkeypatch.setattr(tempfile, "mkstemp", None)
    store = open_store(f"fsspec+file://{tmp_path}/store")
    store.put("key", b"x")
    store.create("other", b"x")
    assert [item.key for item in store.list("")] == ["key", "other"]


def test_where_no_key_can_be_created_once_no_attempt_starts(tmp_path: Path) -> None:
    store = FsspecStore(Other(auto_mkdir=True), f"other://{tmp_path}/store")
    assert not store.promises.create_once
    with pytest.raises(ConfigError, match="at most once"):
        store.create("key", b"x")
    with pytest.raises(ConfigError, match="attempts need a store that creates a key at most once"):
        start_attempt(store, None)
