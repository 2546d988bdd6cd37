"""Attempts and commits: who may write, and what exists. Reading them back is `history.py`.

A commit *is* the existence of a checkpoint: blobs are written first, then the manifest, then the commit. Each start of
the run creates the next attempt record; an attempt that is no longer the newest is fenced.
"""

import re
import secrets
import time
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from checkpointing.blobs import Blob
from checkpointing.errors import CheckpointError, ConfigError, CorruptBlob, Fenced, FormatError, StoreError
from checkpointing.manifest import Manifest, Step, put_manifest
from checkpointing.phases import reached
from checkpointing.records import Record, encode, seal, unseal
from checkpointing.signing import Signature, Signer
from checkpointing.store import AlreadyExists, Store
from checkpointing.tiers import Tiers, copies


def commit_key(step: int, attempt: int) -> str:
    return f"commits/{step:010d}-{attempt:06d}.json"


def attempt_key(attempt: int) -> str:
    return f"attempts/{attempt:06d}.json"


_COMMIT_KEY = re.compile(r"commits/([0-9]{10,})-([0-9]{6,})\.json")
_ATTEMPT_KEY = re.compile(r"attempts/([0-9]{6,})\.json")


def parse_commit_key(key: str) -> tuple[int, int]:
    """(step, attempt) as numbers: names sort by text only as long as no step outgrows its zeros."""
    match = _COMMIT_KEY.fullmatch(key)
    if not match or commit_key(int(match[1]), int(match[2])) != key:
        raise FormatError(f"{key!r} is not the key of a commit")
    return int(match[1]), int(match[2])


def _checked_commit_key(key: str) -> str:
    parse_commit_key(key)
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
        if self.resumed_from and parse_commit_key(self.resumed_from)[1] >= self.attempt:
            raise ValueError(f"attempt {self.attempt} can't resume from {self.resumed_from}")
        return self

    @property
    def key(self) -> str:
        return attempt_key(self.attempt)


class Commit(Record):
    """The checkpoint after `step` steps exists, and `manifest` (digest and size of its bytes) says what it is.

    A signed one is of version 2, and its `signature` is over the rest of it (signing.py).
    """

    version: Literal[1, 2] = 1  # type: ignore[assignment]  # a wider type than Record's
    step: Step
    attempt: AttemptNumber
    nonce: Nonce
    manifest: Blob
    parent: CommitKey | None
    signature: Signature | None = Field(default=None, exclude_if=lambda signature: signature is None)

    @model_validator(mode="after")
    def _of_its_version(self) -> Self:
        if self.signature and self.version == 1:
            raise ValueError("version 1 knows no signature")
        return self

    @property
    def key(self) -> str:
        return commit_key(self.step, self.attempt)


def start_attempt(store: Store, resume: Commit | None, after: int | None = None) -> Attempt:
    """Create the next attempt, which from now on is the only one that can commit.

    `after`: number of the newest attempt when it was decided to start another one, on the primary of tiers. A process
    that has slept since must not take the run from whoever was started in its place. None: start after any.

    Raises:
        ConfigError: the store can't create a key at most once, so nothing could fence the attempts before.
        Fenced: an attempt newer than `after` exists.
        StoreError: storage refused, or another start was always quicker.
    """
    if not store.promises.create_once:
        raise ConfigError("attempts need a store that creates a key at most once, and this one does not promise it")
    primary = store.primary.store if isinstance(store, Tiers) else store
    for _ in range(MAX_STARTS):
        # Commits are counted too: the number of an attempt whose record got lost must not be used again.
        numbers = attempt_numbers(store) | {attempt for _, attempt in commit_positions(store)}
        # Looked up after the numbers: who sleeps in between finds his successor here, or its number taken below.
        if after is not None and (newest := newest_attempt(primary)) > after:
            raise Fenced(f"attempt {newest} of this run was started by another process meanwhile; stop this process")
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


def commit(
    store: Store, attempt: Attempt, manifest: Manifest, parent: Commit | None, signer: Signer | None = None
) -> Commit:
    """Make the checkpoint exist whose blobs have been written. Safe to call again when its outcome is unknown.

    `parent` is this attempt's commit before, or the one that it resumed from. `signer`: None for one without signature.

    Raises:
        Fenced: a newer attempt exists, or the attempt record is another's by now.
        CheckpointError: `parent` is not in line, or this attempt has committed something else as this step.
        StoreError: storage refused; the checkpoint may or may not exist.
    """
    reached("save.before_manifest", step=manifest.step)
    record = Commit(
        version=2 if signer else 1,
        step=manifest.step,
        attempt=attempt.attempt,
        nonce=attempt.nonce,
        manifest=put_manifest(store, manifest),
        parent=parent.key if parent else None,
    )
    if signer:
        record = record.model_copy(update={"signature": signer.sign(encode(record))})
    if not belongs(record, attempt):
        raise CheckpointError(f"{record.key} can't follow {record.parent} in an attempt from {attempt.resumed_from}")
    reached("save.before_commit", step=manifest.step)
    newest = newest_attempt(store)
    if newest > attempt.attempt or read_record(Attempt, store, attempt.key) != attempt:
        raise Fenced(f"attempt {attempt.attempt} is over: attempt {newest} of this run has started; stop this process")
    if not _create(store, record):
        raise CheckpointError(f"{record.key} exists with other content: the same attempt reached this step before")
    return record


def newest_attempt(store: Store) -> int:
    """Number of the newest attempt, 0 before the first."""
    return max(attempt_numbers(store), default=0)


def require_newest(attempt: Attempt, *stores: Store) -> None:
    """Require that each of `stores` knows of no attempt newer than `attempt`, and of no other with its number.

    A store that does not know `attempt` yet has no objection.

    Raises:
        Fenced: it is over; whoever still acts for it must stop.
    """
    for store in stores:
        newest = newest_attempt(store)
        if newest == attempt.attempt:
            try:
                if read_record(Attempt, store, attempt.key) == attempt:
                    continue
            except CorruptBlob:
                continue  # damage is no rival
        if newest >= attempt.attempt:
            raise Fenced(
                f"attempt {attempt.attempt} is over: this run was started again, as attempt {newest}; stop this process"
            )


def belongs(record: Commit, attempt: Attempt) -> bool:
    """Whether `record` is one that `attempt` may have made."""
    if (record.attempt, record.nonce) != (attempt.attempt, attempt.nonce):
        return False
    first = -1 if attempt.resumed_from is None else parse_commit_key(attempt.resumed_from)[0]
    if record.parent == attempt.resumed_from:
        return record.step > first
    if record.parent is None:
        return False
    step, number = parse_commit_key(record.parent)
    return number == attempt.attempt and first < step < record.step


def _create(store: Store, record: Attempt | Commit) -> bool:
    """Create `record`; False if another has its key. An answer that was lost is no defeat: the record is read back."""
    try:
        store.create(record.key, seal(record))
    except AlreadyExists:
        try:
            return read_record(type(record), store, record.key) == record
        except CorruptBlob:
            return False
    return True


def read_record[R: Record](kind: type[R], store: Store, key: str) -> R:
    """The sealed record under `key`, from whichever tier has it whole.

    Raises:
        CorruptBlob: it is missing, or wherever it is it is damaged, or a commit that is not believed (signing.py).
        FormatError: it is whole, and foreign, of a newer version, or not a valid record.
    """
    damage = None
    for copy in copies(store, key):
        try:
            return unseal(kind, copy.data, key)
        except CorruptBlob as error:
            damage = error
    raise damage or CorruptBlob(f"{key} is missing")


def attempt_numbers(store: Store) -> set[int]:
    keys = (item.key for item in store.list("attempts/"))
    return {int(match[1]) for key in keys if (match := _ATTEMPT_KEY.fullmatch(key))}


def commit_positions(store: Store) -> set[tuple[int, int]]:
    """(step, attempt) of every commit. Other names below `commits/` are not commits."""
    positions = set()
    for item in store.list("commits/"):
        try:
            positions.add(parse_commit_key(item.key))
        except FormatError:
            continue
    return positions
