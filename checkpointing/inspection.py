"""What a run has, where, and who needs it. Nothing is written; `verification.py` builds on it."""

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from types import MappingProxyType
from typing import Literal

from checkpointing.blobs import Blob, get_blob
from checkpointing.commit import (
    Attempt,
    Commit,
    attempt_key,
    commit_key,
    commit_positions,
    newest_attempt,
    read_record,
)
from checkpointing.errors import CorruptBlob, StoreError
from checkpointing.events import CheckpointCommitted, CheckpointRejected, Event
from checkpointing.history import Rejected, ranked_commits
from checkpointing.journal import Record
from checkpointing.manifest import Manifest, get_manifest, manifest_key
from checkpointing.records import Strict
from checkpointing.retention import Keep, measured, plan
from checkpointing.tiers import Tier, Tiers


class Holdings:
    """What one tier has, listed once; each thing is looked at once, however many commits share it.

    `refused`: why the tier, or something on it, could not be read; about that nothing is known then.
    """

    def __init__(self, tier: Tier, read_data: bool = False) -> None:
        self.tier, self._read_data = tier, read_data
        self.refused: str | None = None
        self._complaints: dict[str | Blob, str | None] = {}
        self._sizes: dict[str, int] = {}
        try:
            # What names before what is named, so that all of a commit that is made meanwhile is seen, or none.
            for prefix in ("commits/", "attempts/", "manifests/", "blobs/"):
                self._sizes |= {item.key: item.size for item in tier.store.list(prefix)}
        except StoreError as error:
            self.refused = str(error)

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    def blob(self, blob: Blob) -> str | None:
        """What is wrong with this tier's copy of `blob`; None if it is whole, as far as was asked."""
        size = self._sizes.get(blob.key)
        if size != blob.size:
            return self.refused or ("missing" if size is None else f"{size} bytes, {blob.size} expected")
        return self._once(blob, lambda: get_blob(self.tier.store, blob)) if self._read_data else None

    def record(self, kind: type[Attempt] | type[Commit], key: str) -> str | None:
        """The same of a sealed record. Raises FormatError."""
        return self._once(key, lambda: read_record(kind, self.tier.store, key))

    def manifest(self, blob: Blob) -> str | None:
        """The same of a manifest. Raises FormatError."""
        return self._once(manifest_key(blob), lambda: get_manifest(self.tier.store, blob))

    def has_whole(self, found: Commit, manifest: Manifest) -> bool:
        """Whether this tier alone has all that the commit needs; memory holds only bytes. Raises FormatError."""
        return all(self.blob(blob) is None for blob in manifest.blobs()) and (
            not self.tier.store.promises.durable_on_return
            or (
                self.record(Commit, found.key) is None
                and self.record(Attempt, attempt_key(found.attempt)) is None
                and self.manifest(found.manifest) is None
            )
        )

    def _once(self, what: str | Blob, read: Callable[[], object]) -> str | None:
        if what not in self._complaints:
            self._complaints[what] = self._complaint(read)
        return self._complaints[what]

    def _complaint(self, read: Callable[[], object]) -> str | None:
        try:
            read()
        except CorruptBlob as error:
            return str(error)
        except StoreError as error:
            self.refused = str(error)
            return self.refused
        return None


NO_POLICY: Mapping[str, Keep] = MappingProxyType({})

Validity = Literal["valid", "damaged", "abandoned"]


class Checkpoint(Strict):
    """One commit.

    validity     valid: it restores; damaged: no tier has all of it; abandoned: the history of the run went another way
    tiers        those that alone have all of it, by presence and size; a memory tier: as seen from this node
    bytes_total  of all blobs it names; None if its manifest can't be read
    bytes_new    of those that its parent does not name; None if that, or its parent, can't be read
    needed_by    why retention leaves it alone, where a tier has any
    committed    when, in Unix seconds, as far as the journal is at hand
    """

    key: str
    step: int
    attempt: int
    validity: Validity
    reason: str | None
    tiers: tuple[str, ...]
    bytes_total: int | None
    bytes_new: int | None
    needed_by: tuple[str, ...] = ()
    committed: float | None = None


class Overview(Strict):
    """Every commit of a run, newest first.

    newest_local    step of the newest valid checkpoint that the primary tier has
    newest_durable  the same of the last tier; the lag is what lies between
    behind          checkpoints that the primary has and that are newer than all on the last tier
    refused         {tier: why it could not be read}; what is only there does not show
    """

    checkpoints: tuple[Checkpoint, ...]
    newest_local: int | None
    newest_durable: int | None
    behind: int
    refused: dict[str, str]


def overview(tiers: Tiers, keep: Mapping[str, Keep] = NO_POLICY, journal: Sequence[Record] = ()) -> Overview:
    """Look at records, manifests and sizes.

    Args:
        keep: {tier: what it keeps}; a tier that is not named keeps everything.
        journal: of the run, if it is at hand: times, why ranks rejected a commit, metrics that `keep` goes by.

    Raises:
        FormatError: a record is intact but foreign, of a newer version, or forged.
        StoreError: the primary tier refused.
    """
    ranked = list(ranked_commits(tiers))
    held = [Holdings(tier) for tier in tiers.all]
    contents = {one.key: read_content(tiers, one.key) for one in ranked}
    events = [record.event for record in journal]
    times = {record.event.commit: record.time for record in journal if isinstance(record.event, CheckpointCommitted)}
    refusals = {event.commit: event.reason for event in events if isinstance(event, CheckpointRejected)}
    found = [_checkpoint(one, contents, held) for one in ranked]
    valid = [one for one in found if one.validity == "valid"]
    needs = _needs(tiers, held, valid)
    for key, names in _kept(held, keep, events).items():
        needs.setdefault(key, [f"kept on {name}" for name in names])
    local = [one.step for one in valid if tiers.primary.name in one.tiers]
    durable = [one.step for one in valid if tiers.durable[-1].name in one.tiers]
    return Overview(
        checkpoints=tuple(
            one.model_copy(
                update={
                    "reason": one.reason and "; ".join(filter(None, (one.reason, refusals.get(one.key)))),
                    "committed": times.get(one.key),
                    "needed_by": tuple(needs.get(one.key, ())),
                }
            )
            for one in found
        ),
        newest_local=max(local, default=None),
        newest_durable=max(durable, default=None),
        behind=sum(step > max(durable, default=-1) for step in local),
        refused={one.tier.name: one.refused for one in held if one.refused},
    )


def read_content(tiers: Tiers, key: str) -> tuple[Commit | None, Manifest | None]:
    """The commit under `key`, whether or not it is part of the history, and its manifest; None for what no tier has."""
    found = None
    with suppress(CorruptBlob):
        found = read_record(Commit, tiers, key)
        return found, get_manifest(tiers, found.manifest)
    return found, None


Contents = Mapping[str, tuple[Commit | None, Manifest | None]]


def _checkpoint(one: Commit | Rejected, contents: Contents, held: Sequence[Holdings]) -> Checkpoint:
    commit, manifest = contents[one.key]
    validity: Validity
    reason: str | None
    if isinstance(one, Rejected):
        validity, reason = "abandoned" if one.abandoned else "damaged", one.reason
    elif manifest is None:
        validity, reason = "damaged", f"{manifest_key(one.manifest)} is whole on no tier"
    elif lost := [blob for blob in manifest.blobs() if all(tier.blob(blob) for tier in held)]:
        validity, reason = "damaged", f"{lost[0].key} is whole on no tier"
    else:
        validity, reason = "valid", None
    blobs, parents = _blobs(manifest), _parents_blobs(commit, contents)
    return Checkpoint(
        key=one.key,
        step=one.step,
        attempt=one.attempt,
        validity=validity,
        reason=reason,
        tiers=tuple(t.tier.name for t in held if t.has_whole(commit, manifest)) if commit and manifest else (),
        bytes_total=None if blobs is None else _size(blobs),
        bytes_new=None if blobs is None or parents is None else _size(blobs - parents),
    )


def _parents_blobs(commit: Commit | None, contents: Contents) -> Set[Blob] | None:
    if commit is None:
        return None
    return _blobs(contents.get(commit.parent, (None, None))[1]) if commit.parent else frozenset()


def _blobs(manifest: Manifest | None) -> Set[Blob] | None:
    return frozenset(manifest.blobs()) if manifest else None


def _size(blobs: Set[Blob]) -> int:
    return sum(blob.size for blob in blobs)


def _needs(tiers: Tiers, held: Sequence[Holdings], valid: Sequence[Checkpoint]) -> dict[str, list[str]]:
    """{key of a commit: who needs it}. `valid`: newest first."""
    needs: dict[str, list[str]] = {}
    if valid:
        needs[valid[0].key] = ["newest"]
    newest = newest_attempt(tiers)
    with suppress(CorruptBlob):
        resumed = read_record(Attempt, tiers, attempt_key(newest)).resumed_from
        if resumed:
            needs.setdefault(resumed, []).append(f"resumed from by attempt {newest}")
    for tier in held:
        if tier.tier not in tiers.durable or tier.refused:
            continue
        keys = [one.key for one in valid if tier.tier.name in one.tiers]
        if keys and keys[0] != valid[0].key:
            needs.setdefault(keys[0], []).append(f"newest on {tier.tier.name}")
        if tier.tier != tiers.primary:
            waiting = [one.key for one in valid].index(keys[0]) if keys else len(valid)
            for one in valid[:waiting]:
                needs.setdefault(one.key, []).append(f"not on {tier.tier.name} yet")
    return needs


def _kept(held: Sequence[Holdings], keep: Mapping[str, Keep], events: Sequence[Event]) -> dict[str, list[str]]:
    """{key of a commit: tiers whose policy keeps it}."""
    kept: dict[str, list[str]] = {}
    for tier in held:
        policy = keep.get(tier.tier.name)
        if policy is None or tier.refused:
            continue
        metrics = measured(events, policy.best.metric) if policy.best else {}
        store = tier.tier.store
        gone = {item.key for item in plan(store, policy, frozenset(), metrics).commits}
        for key in {commit_key(*position) for position in commit_positions(store)} - gone:
            kept.setdefault(key, []).append(tier.tier.name)
    return kept
