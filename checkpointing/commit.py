"""Attempts and commits: who may write, what exists, and which checkpoint is the newest.

A commit *is* the existence of a checkpoint: blobs are written first, then the manifest, then the commit. There is no
`latest` pointer. The newest checkpoint is derived each time, from records that are created once and never changed:

- Each start of the run creates the next attempt record, which says which commit it resumed from.
- The history of the run is read backwards from the newest attempt: all its commits, then those of the attempt that it
  resumed from up to the commit that it resumed from, and so on. Commits outside the history do not count, so that an
  attempt that wakes up late (a zombie) can't add to it, even if it passes the check in `commit` at the last moment.
- A commit belongs to its attempt if it carries the attempt's nonce and its parent is what its attempt resumed from or
  an earlier commit of the same attempt. That the parent still exists is not required: retention removes old commits,
  and damage to one record must not take every later checkpoint with it.
"""

import re
import secrets
import time
from collections.abc import Iterator
from typing import Annotated, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from checkpointing.blobs import Blob, get_blob, require_present
from checkpointing.errors import CheckpointError, ConfigError, CorruptBlob, Fenced, FormatError, StoreError
from checkpointing.manifest import Manifest, Step, get_manifest, put_manifest
from checkpointing.phases import reached
from checkpointing.records import Record, seal, unseal
from checkpointing.store import AlreadyExists, KeyMissing, Store


def commit_key(step: int, attempt: int) -> str:
    return f"commits/{step:010d}-{attempt:06d}.json"


def attempt_key(attempt: int) -> str:
    return f"attempts/{attempt:06d}.json"


def _parse_commit_key(key: str) -> tuple[int, int]:
    """(step, attempt) as numbers: names sort by text only as long as no step outgrows its zeros."""
    match = re.fullmatch(r"commits/([0-9]{10,})-([0-9]{6,})\.json", key)
    if not match or commit_key(int(match[1]), int(match[2])) != key:
        raise FormatError(f"{key!r} is not the key of a commit")
    return int(match[1]), int(match[2])


def _checked_commit_key(key: str) -> str:
    _parse_commit_key(key)
    return key


MAX_STARTS = 20
"""Tries to get the next attempt number before something must be wrong."""

CommitKey = Annotated[str, AfterValidator(_checked_commit_key)]
AttemptNumber = Annotated[int, Field(ge=1)]
Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Attempt(Record):
    """One start of the run. `attempt` counts from 1; `started_ms` is Unix time in milliseconds.

    The nonce tells this attempt's own records from a rival's when the store's answer to a create was lost.
    """

    attempt: AttemptNumber
    nonce: Nonce
    resumed_from: CommitKey | None
    started_ms: int

    @model_validator(mode="after")
    def _resumes_from_the_past(self) -> Self:
        if self.resumed_from and _parse_commit_key(self.resumed_from)[1] >= self.attempt:
            raise ValueError(f"attempt {self.attempt} can't resume from {self.resumed_from}")
        return self

    @property
    def key(self) -> str:
        return attempt_key(self.attempt)


class Commit(Record):
    """The checkpoint after `step` steps exists, and `manifest` (digest and size of its bytes) says what it is."""

    step: Step
    attempt: AttemptNumber
    nonce: Nonce
    manifest: Blob
    parent: CommitKey | None

    @property
    def key(self) -> str:
        return commit_key(self.step, self.attempt)


class Rejected(NamedTuple):
    """A commit that can't be resumed from. `abandoned`: whole perhaps, but the history of the run went another way."""

    key: str
    step: int
    attempt: int
    reason: str
    abandoned: bool


def start_attempt(store: Store, resume: Commit | None) -> Attempt:
    """Create the next attempt, which from now on is the only one that can commit.

    Raises:
        ConfigError: the store can't create a key at most once, so nothing could fence the attempts before.
        StoreError: storage refused, or another start was always quicker.
    """
    if not store.promises.create_once:
        raise ConfigError("attempts need a store that creates a key at most once, and this one does not promise it")
    for _ in range(MAX_STARTS):
        # Commits are counted too: the number of an attempt whose record got lost must not be used again.
        numbers = _attempt_numbers(store) | {attempt for _, attempt in _commit_positions(store)}
        attempt = Attempt(
            attempt=max(numbers, default=0) + 1,
            nonce=secrets.token_hex(16),
            resumed_from=resume.key if resume else None,
            started_ms=time.time_ns() // 1_000_000,
        )
        if _create(store, attempt):
            return attempt
        # Another start took the number, so that there is a higher one to come after: look again.
    raise StoreError(f"{MAX_STARTS} attempts in a row were started by others; stop what restarts this run so often")


def commit(store: Store, attempt: Attempt, manifest: Manifest, parent: Commit | None) -> Commit:
    """Make the checkpoint exist whose blobs have been written. Safe to call again when its outcome is unknown.

    `parent` is this attempt's commit before, or the one that it resumed from.

    Raises:
        Fenced: a newer attempt exists, or the attempt record is another's by now.
        CheckpointError: `parent` is not in line, or this attempt has committed something else as this step.
        StoreError: storage refused; the checkpoint may or may not exist.
    """
    reached("save.before_manifest", step=manifest.step)
    record = Commit(
        step=manifest.step,
        attempt=attempt.attempt,
        nonce=attempt.nonce,
        manifest=put_manifest(store, manifest),
        parent=parent.key if parent else None,
    )
    if not _belongs(record, attempt):
        raise CheckpointError(f"{record.key} can't follow {record.parent} in an attempt from {attempt.resumed_from}")
    reached("save.before_commit", step=manifest.step)
    newest = newest_attempt(store)
    if newest > attempt.attempt or _read(Attempt, store, attempt.key) != attempt:
        raise Fenced(f"attempt {attempt.attempt} is over: attempt {newest} of this run has started; stop this process")
    if not _create(store, record):
        raise CheckpointError(f"{record.key} exists with other content: the same attempt reached this step before")
    return record


def newest_attempt(store: Store) -> int:
    """Number of the newest attempt, 0 before the first."""
    return max(_attempt_numbers(store), default=0)


def ranked_commits(store: Store) -> Iterator[Commit | Rejected]:
    """Every commit, highest (step, attempt) first, each with its record read, or rejected with the reason.

    Manifests and blobs are not looked at.

    Raises:
        FormatError: a record is intact but foreign, of a newer version, or forged. That is no reason to fall back.
    """
    positions = _commit_positions(store)
    history = _history(store, _attempt_numbers(store) | {attempt for _, attempt in positions})
    newest = next((branch.attempt for branch in history.values() if isinstance(branch, _Branch)), None)
    if newest and newest.resumed_from:
        # Never deleted on purpose. If it is gone, that is damage and not a run that has no commits yet.
        positions.add(_parse_commit_key(newest.resumed_from))
    for step, attempt in sorted(positions, reverse=True):
        yield _judge(store, step, attempt, history)


def valid_commits(store: Store) -> list[Commit]:
    """The commits that make up the history of the run, newest first. Raises like `ranked_commits`."""
    return [found for found in ranked_commits(store) if isinstance(found, Commit)]


def newest_restorable(store: Store, *, read_data: bool = True) -> tuple[tuple[Commit, Manifest] | None, list[Rejected]]:
    """The newest commit of which everything is there, and the commits that rank above it, each with the reason.

    None if the history has no commit: the run starts from the beginning. With `read_data` every blob is read and its
    digest compared, otherwise only its presence and size are.

    Raises:
        CheckpointError: the history has commits and none of them restores.
        FormatError: a record is intact but foreign, of a newer version, or forged. That is no reason to fall back.
        StoreError: storage refused. No reason either: that may pass, while steps given up do not come back.
    """
    rejected: list[Rejected] = []
    for found in ranked_commits(store):
        if isinstance(found, Rejected):
            rejected.append(found)
            continue
        try:
            return (found, _verify(store, found, read_data)), rejected
        except CorruptBlob as error:
            rejected.append(_reject(found.step, found.attempt, str(error)))
    damaged = [found for found in rejected if not found.abandoned]
    if damaged:
        reasons = "".join(f"\n  {found.key}: {found.reason}" for found in damaged[:5])
        raise CheckpointError(
            f"none of {len(damaged)} commits can be restored; bring back the damaged files from another copy, "
            f"or start a new run:{reasons}"
        )
    return None, rejected


class _Branch(NamedTuple):
    """An attempt that is part of the history. `last_step`: later steps of it are not; None if all are."""

    attempt: Attempt
    last_step: int | None


def _history(store: Store, numbers: set[int]) -> dict[int, _Branch | str]:
    """{attempt: its part in the history, or what is wrong with its record}, from the newest attempt back.

    An attempt whose record is damaged is passed over, as if it had never been.
    """
    history: dict[int, _Branch | str] = {}
    last_step, origin = None, max(numbers, default=0)
    for number in sorted(numbers, reverse=True):
        if number > origin:
            continue
        try:
            attempt = _read(Attempt, store, attempt_key(number))
        except CorruptBlob as error:
            history[number] = str(error)
            continue
        history[number] = _Branch(attempt, last_step)
        if attempt.resumed_from is None:
            break
        last_step, origin = _parse_commit_key(attempt.resumed_from)
    return history


def _judge(store: Store, step: int, number: int, history: dict[int, _Branch | str]) -> Commit | Rejected:
    branch = history.get(number)
    if branch is None:
        return _reject(step, number, f"attempt {number} is not in the history of the newest attempt", abandoned=True)
    if isinstance(branch, str):
        return _reject(step, number, branch)
    if branch.last_step is not None and step > branch.last_step:
        return _reject(step, number, f"a later attempt resumed from step {branch.last_step}", abandoned=True)
    key = commit_key(step, number)
    try:
        found = _read(Commit, store, key)
    except CorruptBlob as error:
        return _reject(step, number, str(error))
    if found.key != key or not _belongs(found, branch.attempt):
        return _reject(step, number, f"{key}: it does not belong to attempt {number}")
    return found


def _reject(step: int, attempt: int, reason: str, abandoned: bool = False) -> Rejected:
    return Rejected(commit_key(step, attempt), step, attempt, reason, abandoned)


def _belongs(record: Commit, attempt: Attempt) -> bool:
    """Whether `record` is one that `attempt` may have made."""
    if (record.attempt, record.nonce) != (attempt.attempt, attempt.nonce):
        return False
    first = -1 if attempt.resumed_from is None else _parse_commit_key(attempt.resumed_from)[0]
    if record.parent == attempt.resumed_from:
        return record.step > first
    if record.parent is None:
        return False
    step, number = _parse_commit_key(record.parent)
    return number == attempt.attempt and first < step < record.step


def _verify(store: Store, found: Commit, read_data: bool) -> Manifest:
    """Read the manifest and check every blob. Raises CorruptBlob or FormatError."""
    manifest = get_manifest(store, found.manifest)
    if manifest.step != found.step:
        raise FormatError(f"{found.key}: its manifest is of step {manifest.step}")
    for blob in manifest.blobs():
        if read_data:
            get_blob(store, blob)
        else:
            require_present(store, blob)
    return manifest


def _create(store: Store, record: Attempt | Commit) -> bool:
    """Create `record`; False if another has its key. An answer that was lost is no defeat: the record is read back."""
    try:
        store.create(record.key, seal(record))
    except AlreadyExists:
        try:
            return _read(type(record), store, record.key) == record
        except CorruptBlob:
            return False
    return True


def _read[R: Record](kind: type[R], store: Store, key: str) -> R:
    try:
        return unseal(kind, store.get(key), key)
    except KeyMissing as error:
        raise CorruptBlob(f"{key} is missing: {error}") from error


def _attempt_numbers(store: Store) -> set[int]:
    keys = (item.key for item in store.list("attempts/"))
    return {int(match[1]) for key in keys if (match := re.fullmatch(r"attempts/([0-9]{6,})\.json", key))}


def _commit_positions(store: Store) -> set[tuple[int, int]]:
    """(step, attempt) of every commit. Other names below `commits/` are not commits."""
    positions = set()
    for item in store.list("commits/"):
        try:
            positions.add(_parse_commit_key(item.key))
        except FormatError:
            continue
    return positions
