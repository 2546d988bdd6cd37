"""Small checkpoints and interruptions, shared by the tests of `checkpointing/`."""

import os
from collections.abc import Buffer, Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import pytest

from checkpointing.blobs import get_blob, put_blob
from checkpointing.canonical import digest
from checkpointing.commit import Attempt, Commit, commit, start_attempt
from checkpointing.history import valid_commits
from checkpointing.manifest import Entry, Manifest, Shard, get_manifest
from checkpointing.retention import Keep, Pruner, plan
from checkpointing.signing import Signer
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


def save(
    store: Store,
    attempt: Attempt,
    step: int,
    parent: Commit | None,
    payload: str = "same",
    signer: Signer | None = None,
) -> Commit:
    return commit(store, attempt, sample(store, step, payload), parent, signer)


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


class Mortal(Wrapper):
    """A store whose process dies just before or just after the n-th of its writing verbs. Counts them either way."""

    def __init__(self, store: Store, dies_at: int | None = None, done: bool = False) -> None:
        super().__init__(store)
        self._dies_at, self._done, self.calls = dies_at, done, list[tuple[str, str]]()

    def put(self, key: str, data: Buffer) -> None:
        self._guarded("put", key, lambda: super(Mortal, self).put(key, data))

    def create(self, key: str, data: Buffer) -> None:
        self._guarded("create", key, lambda: super(Mortal, self).create(key, data))

    def delete(self, key: str) -> None:
        self._guarded("delete", key, lambda: super(Mortal, self).delete(key))

    def _guarded(self, verb: str, key: str, act: Callable[[], None]) -> None:
        here = len(self.calls) == self._dies_at
        self.calls.append((verb, key))
        if here and not self._done:
            raise Crash
        try:
            act()
        finally:
            if here:
                raise Crash


def train(
    store: Store, resume: Commit | None, *steps: int, payload: str = "", signer: Signer | None = None
) -> tuple[Attempt, list[Commit]]:
    """One attempt that commits `steps`."""
    attempt, commits = start_attempt(store, resume), []
    for step in steps:
        resume = save(store, attempt, step, resume, payload or f"step {step}", signer)
        commits.append(resume)
    return attempt, commits


def assert_whole(store: Store, *commits: Commit) -> None:
    """Exactly these are on the tier, by itself, and every byte of theirs is right."""
    assert valid_commits(store) == sorted(commits, key=lambda found: found.step, reverse=True)
    for found in commits:
        for blob in get_manifest(store, found.manifest).blobs():
            get_blob(store, blob)


def flip(store: Store, key: str) -> None:
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 4
    store.put(key, data)


def blob_keys(store: Store, found: Commit) -> list[str]:
    return [blob.key for blob in get_manifest(store, found.manifest).blobs()]


def kinds(store: Store) -> dict[str, int]:
    return {kind: len(store.list(f"{kind}/")) for kind in ("commits", "manifests", "blobs")}


def prune_all(store: Store, attempt: Attempt, keep: Keep) -> None:
    pruner = Pruner(store, keep)
    for _ in range(3):
        pruner.prune(attempt, frozenset(), {})


def goes(store: Store, keep: Keep, protected: Set[str] = frozenset(), metrics: Mapping[int, float] = {}) -> list[int]:
    """Steps of the commits that `plan` would delete."""
    return [int(item.key[8:18]) for item in plan(store, keep, protected, metrics or {}).commits]
