"""Which checkpoints a run has, and which is the newest that restores: the reading half of `commit.py`.

There is no `latest` pointer. The newest checkpoint is derived each time, from records that are created once and never
changed:

- Each start of the run creates the next attempt record, which says which commit it resumed from.
- The history of the run is read backwards from the newest attempt: all its commits, then those of the attempt that it
  resumed from up to the commit that it resumed from, and so on. Commits outside the history do not count, so that an
  attempt that wakes up late (a zombie) can't add to it, even if it passes the check in `commit` at the last moment.
- A commit belongs to its attempt if it carries the attempt's nonce and its parent is what its attempt resumed from or
  an earlier commit of the same attempt. That the parent still exists is not required: retention removes old commits,
  and damage to one record must not take every later checkpoint with it.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from checkpointing.blobs import get_blob, require_present
from checkpointing.commit import (
    Attempt,
    Commit,
    attempt_key,
    attempt_numbers,
    belongs,
    commit_key,
    commit_positions,
    parse_commit_key,
    read_record,
)
from checkpointing.errors import CheckpointError, CorruptBlob, FormatError
from checkpointing.manifest import Manifest, get_manifest
from checkpointing.store import Store

NOTHING: Mapping[str, str] = MappingProxyType({})


class Rejected(NamedTuple):
    """A commit that can't be resumed from. `abandoned`: whole perhaps, but the history of the run went another way."""

    key: str
    step: int
    attempt: int
    reason: str
    abandoned: bool


def ranked_commits(store: Store) -> Iterator[Commit | Rejected]:
    """Every commit, highest (step, attempt) first, each with its record read, or rejected with the reason.

    Manifests and blobs are not looked at.

    Raises:
        FormatError: a record is intact but foreign, of a newer version, or forged. That is no reason to fall back.
    """
    positions = commit_positions(store)
    history = _history(store, attempt_numbers(store) | {attempt for _, attempt in positions})
    newest = next((branch.attempt for branch in history.values() if isinstance(branch, _Branch)), None)
    if newest and newest.resumed_from:
        # Never deleted on purpose. If it is gone, that is damage and not a run that has no commits yet.
        positions.add(parse_commit_key(newest.resumed_from))
    for step, attempt in sorted(positions, reverse=True):
        yield _judge(store, step, attempt, history)


def valid_commits(store: Store) -> list[Commit]:
    """The commits that make up the history of the run, newest first. Raises like `ranked_commits`."""
    return [found for found in ranked_commits(store) if isinstance(found, Commit)]


def newest_restorable(
    store: Store, *, read_data: bool = True, unusable: Mapping[str, str] = NOTHING
) -> tuple[tuple[Commit, Manifest] | None, list[Rejected]]:
    """The newest commit of which everything is there, and the commits that rank above it, each with the reason.

    None if the history has no commit: the run starts from the beginning. With `read_data` every blob is read and its
    digest compared, otherwise only its presence and size are. `unusable` are commits that are known not to restore:
    {key: why}.

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
        if found.key in unusable:
            rejected.append(_reject(found.step, found.attempt, unusable[found.key]))
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
            attempt = read_record(Attempt, store, attempt_key(number))
        except CorruptBlob as error:
            history[number] = str(error)
            continue
        history[number] = _Branch(attempt, last_step)
        if attempt.resumed_from is None:
            break
        last_step, origin = parse_commit_key(attempt.resumed_from)
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
        found = read_record(Commit, store, key)
    except CorruptBlob as error:
        return _reject(step, number, str(error))
    if found.key != key or not belongs(found, branch.attempt):
        return _reject(step, number, f"{key}: it does not belong to attempt {number}")
    return found


def _reject(step: int, attempt: int, reason: str, abandoned: bool = False) -> Rejected:
    return Rejected(commit_key(step, attempt), step, attempt, reason, abandoned)


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
