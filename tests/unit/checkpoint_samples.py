"""Small checkpoints and interruptions, shared by the tests of `checkpointing/`."""

import os
from collections.abc import Buffer, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from checkpointing.blobs import put_blob
from checkpointing.canonical import digest
from checkpointing.commit import Attempt, Commit, commit
from checkpointing.manifest import Entry, Manifest, Shard
from checkpointing.store import Item, Promises, Store


class Crash(BaseException):
    """The process dies here. No product code may catch it."""


def listen(monkeypatch: pytest.MonkeyPatch, listener: Callable[[str, dict[str, Any]], None]) -> None:
    monkeypatch.setattr("checkpointing.phases._listener", lambda: listener)


@contextmanager
def without_fsync() -> Iterator[None]:
    """For tests that write thousands of times. That every write is synced is tested on its own."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda fd: None)
        yield


def sample(store: Store, step: int, payload: str) -> Manifest:
    """Write the blobs of a checkpoint with two ranks and a driver, and describe it."""
    shards = [
        Shard(
            rank=rank,
            tensors=put_blob(store, f"tensors {payload} {rank}".encode()),
            data=put_blob(store, b"null"),
            tensor_digests={"weight": digest(f"{payload} {rank}".encode())},
        )
        for rank in range(2)
    ]
    position = Shard(rank=0, tensors=None, data=put_blob(store, b"%d" % step), tensor_digests={})
    entries = [Entry.of("policy/parameters", shards), Entry.of("driver/position", [position])]
    return Manifest(
        step=step, topology={"policy": 2}, entries={entry.name: entry for entry in entries}, run={"config": "c0ffee"}
    )


def save(store: Store, attempt: Attempt, step: int, parent: Commit | None, payload: str = "same") -> Commit:
    return commit(store, attempt, sample(store, step, payload), parent)


class Wrapper:
    """A store in front of another, to be made worse by subclasses."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def promises(self) -> Promises:
        return self._store.promises

    def put(self, key: str, data: Buffer) -> None:
        self._store.put(key, data)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def list(self, prefix: str) -> Sequence[Item]:
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def create(self, key: str, data: Buffer) -> None:
        self._store.create(key, data)


def late(store: Store, attempt: Attempt, step: int, parent: Commit | None) -> Commit:
    """The commit of a zombie that made the check in `commit`, slept while others started, and now goes on."""
    manifest = sample(store, step, "zombie")
    numbers = [item for item in store.list("attempts/") if item.key <= attempt.key]

    class Slept(Wrapper):
        def list(self, prefix: str) -> Sequence[Item]:
            return numbers if prefix == "attempts/" else super().list(prefix)

    return commit(Slept(store), attempt, manifest, parent)
