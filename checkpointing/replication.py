"""Carrying commits from one store to another, whole and in order; and putting back what a tier has lost.

Which commits wait is derived from the two stores each time, so that a process that starts again goes on where the one
before it stopped. A commit appears on the target when everything that it names is there: blobs, then manifest, then
commit, as in a save. (`replicator.py` is the process that does this for a run.)
"""

import json
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from itertools import takewhile
from typing import NamedTuple

from checkpointing.blobs import Blob, get_blob, require_present
from checkpointing.commit import (
    Attempt,
    Commit,
    attempt_key,
    attempt_numbers,
    commit_key,
    commit_positions,
    read_record,
    require_newest,
)
from checkpointing.errors import AlreadyExists, CheckpointError, CorruptBlob, KeyMissing, RunMismatch
from checkpointing.history import ranked_commits
from checkpointing.manifest import Manifest, get_manifest, manifest_key, put_manifest
from checkpointing.phases import reached
from checkpointing.records import seal
from checkpointing.store import Store
from checkpointing.tiers import Tier, Tiers, copies

RUN_KEY = "run.json"
"""What run a store belongs to: canonical JSON, created once, not sealed."""


class Backlog(NamedTuple):
    """Commits that are not on a tier yet, oldest first. `coalesced` will not be carried: too many newer ones wait."""

    pending: tuple[Commit, ...]
    coalesced: tuple[Commit, ...]


def backlog(source: Store, target: Store, limit: int) -> Backlog:
    """The commits of the source's history that are newer than all of it that the target has.

    The newest `limit` are pending. Raises like `ranked_commits`.
    """
    there = {commit_key(*position) for position in commit_positions(target)}
    # The history is that of both together: retention may have deleted from the source what the target still has.
    both = Tiers([Tier("source", "", source), Tier("target", "", target)])
    valid = (found for found in ranked_commits(both) if isinstance(found, Commit))
    waiting = list(takewhile(lambda found: found.key not in there, valid))
    return Backlog(tuple(waiting[:limit][::-1]), tuple(waiting[limit:][::-1]))


def undurable(commits: Iterable[Commit], replicated: Mapping[str, Set[str]], limit: int) -> set[str]:
    """Keys of those of `commits` (valid, newest first) that retention must spare: some tier still waits for them.

    `replicated` has for each tier the keys of the commits that are on it. What `backlog` coalesces is not spared.
    """
    keys, spared = [found.key for found in commits], set[str]()
    for there in replicated.values():
        waiting = next((index for index, key in enumerate(keys) if key in there), len(keys))
        spared.update(keys[: min(waiting, limit)])
    return spared


def replicate(source: Store, target: Store, attempt: Attempt | None, found: Commit) -> int:
    """Make the commit `found` of `source` exist on `target`; returns the bytes of blobs and manifest that were moved.

    Safe to call again whatever became of the call before. Every blob is verified as it is read. A blob that the target
    has in the right size is not sent again and not read back: blobs are write-once there and their checksums were
    verified on the way, and reading costs money. Rot is found by `harness check --read-data`.

    Args:
        attempt: for which this is done; None if a person asked for it, and nothing fences.

    Raises:
        Fenced: source or target knows a newer attempt.
        CorruptBlob: the source has lost or damaged what the commit names.
        RunMismatch: the target belongs to another run.
        CheckpointError: the target has another commit or attempt under the same name.
        StoreError: storage refused; the commit may or may not exist.
    """

    def permitted() -> None:
        if attempt is not None:
            require_newest(attempt, source, target)

    permitted()
    _carry_run(source, target)
    for number in sorted(attempt_numbers(source) - attempt_numbers(target) | {found.attempt}):
        try:
            _carry_record(Attempt, source, target, attempt_key(number), permitted)
        except CorruptBlob:
            if number == found.attempt:
                raise
            # Without its record an attempt is passed over in the history, here as there.
    moved = _carry_bytes(source, target, get_manifest(source, found.manifest), found)
    reached("replicate.before_commit", step=found.step)
    _carry_record(Commit, source, target, found.key, permitted)
    reached("replicate.committed", step=found.step)
    return moved


def _carry_run(source: Store, target: Store) -> None:
    mine, theirs = _bytes(source, RUN_KEY), _bytes(target, RUN_KEY)
    if theirs is None and mine is not None:
        with suppress(AlreadyExists):
            target.create(RUN_KEY, mine)
        theirs = _bytes(target, RUN_KEY)
    if mine is not None and theirs != mine:
        raise RunMismatch(f"{RUN_KEY} says that this tier belongs to another run; give each run a place of its own")


def _bytes(store: Store, key: str) -> bytes | None:
    try:
        return store.get(key)
    except KeyMissing:
        return None


def _carry_record[R: (Attempt, Commit)](
    kind: type[R], source: Store, target: Store, key: str, permitted: Callable[[], None]
) -> bool:
    """Create the record on `target`, or put it over one that is damaged there; False if it was there and whole."""
    record = read_record(kind, source, key)
    permitted()
    try:
        target.create(key, seal(record))
        return True
    except AlreadyExists:
        try:
            theirs = read_record(kind, target, key)
        except CorruptBlob:
            target.put(key, seal(record))
            return True
    if theirs != record:
        raise CheckpointError(
            f"{key} is another one there: two runs, or two starts of this one, write to the same tier"
        )
    return False


def _carry_bytes(source: Store, target: Store, manifest: Manifest, found: Commit) -> int:
    moved = 0
    for blob in manifest.blobs():
        if not _present(target, blob):
            target.put(blob.key, get_blob(source, blob))
            moved += blob.size
        reached("replicate.blob", step=found.step)
    reached("replicate.before_manifest", step=found.step)
    put_manifest(target, manifest)
    return moved + found.manifest.size


def _present(store: Store, blob: Blob) -> bool:
    try:
        require_present(store, blob)
    except CorruptBlob:
        return False
    return True


class Repaired(NamedTuple):
    """What `repair` has done. `failed`: {key: why no tier that answered could help}."""

    written: tuple[str, ...]
    bytes_written: int
    failed: dict[str, str]


def repair(tiers: Tiers, target: Tier, *, read_data: bool) -> Repaired:
    """Put back on `target` what is missing or damaged there and whole on another tier; nothing is ever deleted.

    That includes commits that retention deleted there: what was deleted and what was lost look the same. The next
    prune deletes them again. Bytes that can be had are put back even if the rest of their checkpoint is lost; a commit
    is put back only when all its bytes are there. Whole records of the target win over other tiers'.

    Args:
        read_data: also read every blob of the target and compare its digest; otherwise only its presence and size.

    Raises:
        FormatError: a record is intact but foreign, of a newer version, or forged.
        StoreError: storage refused; call again.
    """
    return _Repair(tiers, target, read_data).run()


class _Repair:
    def __init__(self, tiers: Tiers, target: Tier, read_data: bool) -> None:
        self._sources = Tiers([target, *(tier for tier in tiers.all if tier != target)])
        self._target, self._read_data = target.store, read_data
        self._sound: dict[Blob, bool] = {}
        self._written: list[str] = []
        self._bytes = 0
        self._failed: dict[str, str] = {}

    def run(self) -> Repaired:
        self._run_record()
        for number in sorted(attempt_numbers(self._sources)):
            self._record(Attempt, attempt_key(number))
        for position in sorted(commit_positions(self._sources)):
            self._commit(commit_key(*position))
        return Repaired(tuple(self._written), self._bytes, self._failed)

    def _run_record(self) -> None:
        readable = [copy.data for copy in copies(self._sources, RUN_KEY) if _is_json(copy.data)]
        if readable and _bytes(self._target, RUN_KEY) != readable[0]:
            self._put(RUN_KEY, readable[0])

    def _record[R: (Attempt, Commit)](self, kind: type[R], key: str) -> None:
        try:
            if _carry_record(kind, self._sources, self._target, key, lambda: None):
                self._written.append(key)
        except CorruptBlob as error:
            self._failed[key] = str(error)

    def _commit(self, key: str) -> None:
        try:
            found = read_record(Commit, self._sources, key)
            manifest = get_manifest(self._sources, found.manifest)
        except CorruptBlob as error:
            self._failed[key] = str(error)
            return
        whole = [self._blob(blob) for blob in manifest.blobs()]
        try:
            get_manifest(self._target, found.manifest)
        except CorruptBlob:
            self._written.append(manifest_key(put_manifest(self._target, manifest)))
        if all(whole):
            self._record(Commit, key)
        else:
            self._failed[key] = "bytes that it names are lost"

    def _blob(self, blob: Blob) -> bool:
        """Whether the target has it in the end; each is looked at once, however many commits share it."""
        if blob not in self._sound:
            self._sound[blob] = self._is_sound(blob) or self._put_back(blob)
        return self._sound[blob]

    def _is_sound(self, blob: Blob) -> bool:
        if not self._read_data:
            return _present(self._target, blob)
        try:
            get_blob(self._target, blob)
        except CorruptBlob:
            return False
        return True

    def _put_back(self, blob: Blob) -> bool:
        try:
            data = get_blob(self._sources, blob)
        except CorruptBlob as error:
            self._failed[blob.key] = str(error)
            return False
        self._put(blob.key, data)
        return True

    def _put(self, key: str, data: bytes) -> None:
        self._target.put(key, data)
        self._written.append(key)
        self._bytes += len(data)


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return False
    return True
