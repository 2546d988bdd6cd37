"""Retention: which commits a tier need not keep, and deleting them so that no crash loses or leaks anything.

What is deleted is decided from commits and manifests alone. Whatever the policies say, these stay:

- the newest commit that is whole on this tier, and the one that the newest attempt resumed from;
- what the caller protects: not on the next tier yet (`replication.undurable`), named by a promotion;
- everything, while the record of an attempt or a promotion can't be read, or no commit is whole;
- all manifests and blobs, while the record or manifest of a remaining commit can't be read.

A commit is whole if its manifest is readable and every blob is there in the right size. One that is not does not count
among the newest N, and stays until N whole ones are newer: time for `harness repair`. Abandoned commits are expendable.

Order of deleting: commit records; a checkpoint later the blobs that only deleted commits name; each manifest after its
blobs. So a manifest without a commit is the list of what is still to be deleted, for whoever comes after a crash. The
grace is for whoever has read a commit and is still reading its bytes.

Only the thread that writes commits to a store may prune it, between saves: a save skips blobs that are there already,
and a prune at the same time could delete one of those.
"""

import math
import re
from collections.abc import Iterable, Mapping, Set
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from checkpointing.blobs import Blob
from checkpointing.commit import (
    Attempt,
    Commit,
    attempt_key,
    attempt_numbers,
    commit_key,
    commit_positions,
    newest_attempt,
    read_record,
    require_newest,
)
from checkpointing.errors import CorruptBlob
from checkpointing.events import Evaluated, Event, StepDone
from checkpointing.history import Rejected, ranked_commits
from checkpointing.manifest import Manifest, get_manifest, manifest_key
from checkpointing.phases import reached
from checkpointing.promotion import promoted
from checkpointing.store import Item, Store

_MANIFEST = re.compile(r"manifests/[0-9a-f]{64}\.json")

Count = Annotated[int, Field(ge=1)]


class Best(BaseModel):
    """The `count` best by a metric, of those steps for which it was measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str
    count: Count
    mode: Literal["max", "min"] = "max"


class Keep(BaseModel):
    """What a tier keeps: whatever any of these policies names, and nothing else that it does not have to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    newest: Count = Field(default=1, description="so many of the newest checkpoints")
    every: Count | None = Field(default=None, description="each checkpoint whose step is a multiple of this")
    best: Best | None = None


class Orphan(NamedTuple):
    """A manifest that no commit names, and those of its blobs that no remaining commit needs."""

    manifest: Item
    blobs: tuple[Item, ...]


class Plan(NamedTuple):
    """What is to be deleted, or what was. `commits`: their records, oldest first."""

    commits: tuple[Item, ...] = ()
    orphans: tuple[Orphan, ...] = ()

    @property
    def bytes_freed(self) -> int:
        items = {*self.commits, *(item for orphan in self.orphans for item in (orphan.manifest, *orphan.blobs))}
        return sum(item.size for item in items)


def measured(events: Iterable[Event], metric: str) -> dict[int, float]:
    """{step: value of `metric`}, from evaluations and from what steps log."""
    found: dict[int, float] = {}
    for event in events:
        if isinstance(event, StepDone) and metric in event.scalars:
            found[event.step] = float.fromhex(event.scalars[metric])
        elif isinstance(event, Evaluated) and metric in event.metrics:
            found[event.step] = event.metrics[metric]
    return found


def plan(store: Store, keep: Keep, protected: Set[str], metrics: Mapping[int, float]) -> Plan:
    """What `keep` lets go of on the tier `store`; nothing is deleted yet.

    Args:
        protected: keys of commits that stay besides those that always do.
        metrics: {step: value of `keep.best.metric`}; a step without a finite one is none of the best.

    Raises:
        FormatError: a record or manifest is intact but foreign, of a newer version, or forged.
        StoreError: storage refused.
    """
    attempts = _attempts(store)
    if attempts is None:
        return Plan()
    try:
        promotions = promoted(store)
    except CorruptBlob:
        return Plan()
    tier = _Contents(store)
    ranked = list(ranked_commits(store))
    history = [found for found in ranked if not (isinstance(found, Rejected) and found.abandoned)]
    whole = [found for found in history if isinstance(found, Commit) and tier.is_whole(found)]
    if not whole:
        return Plan()
    stay = {*protected, *promotions, *_kept(history, whole, keep, metrics)}
    stay.update(attempt.resumed_from for attempt in attempts[-1:] if attempt.resumed_from)
    expendable = {found.key for found in ranked} - stay
    commits = [item for key, item in tier.commits.items() if key in expendable]
    return Plan(tuple(commits), tier.orphans(tier.commits.keys() - expendable))


def unreferenced(store: Store) -> tuple[Item, ...]:
    """Blobs that no manifest names: left by saves that were killed, or not named yet by one that goes on.

    () while a commit's record or manifest can't be read.
    """
    tier = _Contents(store)
    if tier.needed(tier.commits.keys()) is None:
        return ()
    named = tier.blobs_of(tier.manifests)
    return tuple(item for key, item in tier.blobs.items() if key not in named)


class Pruner:
    """Deletes on one tier what `keep` lets go of. One per tier and process, see the head of this file.

    `primary` is where attempts are started, if that is another tier: it may know of a newer one first.
    """

    def __init__(self, store: Store, keep: Keep, primary: Store | None = None) -> None:
        self._store, self._keep = store, keep
        self._witnesses = (store,) if primary is None else (store, primary)
        self._orphans: Set[str] = frozenset()

    def prune(self, attempt: Attempt, protected: Set[str], metrics: Mapping[int, float]) -> Plan:
        """Delete as `plan` says, manifests and blobs only if the call before saw them orphaned. Returns what is gone.

        That is nothing on a tier that has not heard of `attempt` yet: it would judge by a history of the past.

        Raises:
            Fenced: a newer attempt exists.
            FormatError, StoreError: like `plan`. What is left is deleted by later calls.
        """
        if newest_attempt(self._store) < attempt.attempt:
            return Plan()
        found = plan(self._store, self._keep, protected, metrics)
        for item in found.commits:
            self._delete(attempt, item, "prune.commit_deleted")
        due = [orphan for orphan in found.orphans if orphan.manifest.key in self._orphans]
        self._orphans = {orphan.manifest.key for orphan in found.orphans}
        spared = {blob for orphan in found.orphans if orphan not in due for blob in orphan.blobs}
        gone = []
        for orphan in due:
            blobs = tuple(blob for blob in orphan.blobs if blob not in spared)
            for blob in blobs:
                self._delete(attempt, blob, "prune.blob_deleted")
            spared.update(blobs)
            self._delete(attempt, orphan.manifest, "prune.manifest_deleted")
            gone.append(Orphan(orphan.manifest, blobs))
        return Plan(found.commits, tuple(gone))

    def sweep(self, attempt: Attempt) -> int:
        """Delete what is `unreferenced`, while nothing is being saved; returns the bytes freed. Raises Fenced."""
        items = unreferenced(self._store)
        for item in items:
            self._delete(attempt, item, "prune.blob_deleted")
        return sum(item.size for item in items)

    def _delete(self, attempt: Attempt, item: Item, phase: str) -> None:
        # Each time: nothing else keeps an attempt that slept from deleting what a newer one is about to build on.
        require_newest(attempt, *self._witnesses)
        self._store.delete(item.key)
        reached(phase, key=item.key)


def _attempts(store: Store) -> list[Attempt] | None:
    """Every attempt that left something, oldest first; None if the record of one can't be read."""
    numbers = attempt_numbers(store) | {number for _, number in commit_positions(store)}
    try:
        return [read_record(Attempt, store, attempt_key(number)) for number in sorted(numbers)]
    except CorruptBlob:
        return None


def _kept(
    history: list[Commit | Rejected], whole: list[Commit], keep: Keep, metrics: Mapping[int, float]
) -> Iterable[str]:
    """Keys of the commits that the policies name. `history` and `whole` are newest first."""
    last = whole[keep.newest - 1].step if len(whole) >= keep.newest else 0
    for found in history:
        if found.step >= last or (keep.every and found.step % keep.every == 0):
            yield found.key
    if keep.best:
        sign = 1 if keep.best.mode == "max" else -1
        ranked = [found for found in whole if math.isfinite(metrics.get(found.step, math.nan))]
        ranked.sort(key=lambda found: sign * metrics[found.step], reverse=True)  # of equals the newer one first
        yield from (found.key for found in ranked[: keep.best.count])


class _Contents:
    """What a tier holds, read once: {key: item} of blobs and commits, {key: manifest, None where unreadable}."""

    def __init__(self, store: Store) -> None:
        listed = {item.key: item for item in store.list("commits/")}
        keys = [commit_key(*position) for position in sorted(commit_positions(store))]
        self.commits = {key: listed[key] for key in keys if key in listed}
        self._items = {item.key: item for item in store.list("manifests/") if _MANIFEST.fullmatch(item.key)}
        self.blobs = {item.key: item for item in store.list("blobs/")}
        self._records = {key: _read_commit(store, key) for key in self.commits}
        self.manifests = {key: _read_manifest(store, item) for key, item in self._items.items()}

    def is_whole(self, found: Commit) -> bool:
        manifest = self.manifests.get(manifest_key(found.manifest))
        return manifest is not None and all(
            self.blobs.get(blob.key) == Item(blob.key, blob.size) for blob in manifest.blobs()
        )

    def needed(self, commits: Iterable[str]) -> set[str] | None:
        """Keys of the manifests that `commits` name. None if a record or manifest can't be read: which blobs, then?"""
        records = [self._records[key] for key in commits]
        keys = {manifest_key(record.manifest) for record in records if record}
        return None if None in records or any(self.manifests.get(key) is None for key in keys) else keys

    def blobs_of(self, manifests: Iterable[str]) -> set[str]:
        return {blob.key for name in manifests if (found := self.manifests[name]) for blob in found.blobs()}

    def orphans(self, commits: Set[str]) -> tuple[Orphan, ...]:
        """What no longer belongs to anything once only `commits` remain."""
        needed = self.needed(commits)
        if needed is None:
            return ()
        live = self.blobs_of(needed)
        found = []
        for name, manifest in self.manifests.items():
            if name in needed:
                continue
            blobs = [blob.key for blob in manifest.blobs() if blob.key not in live] if manifest else []
            found.append(Orphan(self._items[name], tuple(self.blobs[key] for key in blobs if key in self.blobs)))
        return tuple(found)


def _read_commit(store: Store, key: str) -> Commit | None:
    try:
        return read_record(Commit, store, key)
    except CorruptBlob:
        return None


def _read_manifest(store: Store, item: Item) -> Manifest | None:
    digest = item.key.removeprefix("manifests/").removesuffix(".json")
    try:
        return get_manifest(store, Blob(digest=digest, size=item.size))
    except CorruptBlob:
        return None
