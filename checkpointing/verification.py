"""Whether a run's checkpoints are what they were when they were written, tier by tier, and what is safe.

What should be on a tier is what its commits name, and on the primary also whatever of the history is newer than all of
it that is there. That an older commit is not on a tier is no damage: retention deleted it, or it was never carried.
"""

from collections import Counter
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from pydantic import computed_field
from pydantic_core import from_json

from checkpointing.blobs import Blob
from checkpointing.commit import Attempt, Commit, attempt_key, commit_key, commit_positions, parse_commit_key
from checkpointing.errors import CHECK_DAMAGED, CheckpointError, RunMismatch, StoreError
from checkpointing.history import Rejected, ranked_commits
from checkpointing.inspection import Holdings, read_content
from checkpointing.manifest import Manifest, manifest_key
from checkpointing.records import Strict
from checkpointing.replication import RUN_KEY
from checkpointing.tiers import Tier, Tiers

READERS = 4
"""Blobs of one tier read at once; so many are held in memory."""


class Damage(Strict):
    """One key that is not whole on `tier`. `needed_by`: keys of commits; `elsewhere`: tiers that have it whole."""

    tier: str
    key: str
    what: str
    needed_by: tuple[str, ...]
    elsewhere: tuple[str, ...]


class TierChecked(Strict):
    """`whole`: how many commits this tier alone has; `restores`: step of the newest of them in the history."""

    tier: str
    commits: int
    whole: int
    restores: int | None
    refused: str | None


class Check(Strict):
    """What was found, and whether it is safe.

    newest    step of the newest commit of the history, whether or not it restores; None if there is none
    restores  step of the newest that does, with what all tiers have together
    reason    why that is not the newest, if it is not
    signers   {public key: commits that it has signed}, signatures that hold and are believed
    unsigned  commits without a signature, where that is allowed
    """

    read_data: bool
    newest: int | None
    restores: int | None
    reason: str | None
    tiers: tuple[TierChecked, ...]
    damages: tuple[Damage, ...]
    signers: dict[str, int]
    unsigned: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def exit_code(self) -> int:
        """0: all is whole; 12: the newest does not restore; 13: a tier could not be read; 22: damaged otherwise."""
        if any(tier.refused for tier in self.tiers):
            return StoreError.exit_code
        if self.restores is None or self.restores != self.newest:
            return CheckpointError.exit_code
        return CHECK_DAMAGED if self.damages else 0


def check(tiers: Tiers, only: Tier | None = None, *, read_data: bool = False) -> Check:
    """Look at every record and manifest, and at presence and size of every blob, of each durable tier, or of `only`.

    Args:
        read_data: also read every blob and compare its digest.

    Raises:
        FormatError: a record is intact but foreign, of a newer version, or forged.
        RunMismatch: a tier belongs to another run.
        StoreError: the primary tier refused.
    """
    return _Check(tiers, read_data).run([only] if only else tiers.durable)


def run_ids(tiers: Tiers) -> dict[str, str | None]:
    """{tier that says to what run it belongs: which, None where that can't be read}.

    Raises:
        RunMismatch: they are not of one run.
    """
    ids = {copy.tier: _run_id(copy.data) for copy in tiers.copies(RUN_KEY)}
    if len({run_id for run_id in ids.values() if run_id is not None}) > 1:
        raise RunMismatch(f"{RUN_KEY}: the tiers {', '.join(ids)} belong to different runs; give each run its own")
    return ids


class _Check:
    def __init__(self, tiers: Tiers, read_data: bool) -> None:
        self._tiers, self._read_data = tiers, read_data
        # Before the tiers are listed: all that these commits name is there by then. Of later ones nothing is said.
        self._ranked = list(ranked_commits(tiers))
        self._history = [one for one in self._ranked if not (isinstance(one, Rejected) and one.abandoned)]
        self._held = [Holdings(tier, read_data) for tier in tiers.all]
        self._commits: dict[str, Commit | None] = {}
        self._manifests: dict[str, Manifest | None] = {}
        for one in self._ranked:
            self._commits[one.key], self._manifests[one.key] = read_content(tiers, one.key)

    def run(self, examined: Sequence[Tier]) -> Check:
        results = [self._tier(held) for held in self._held if held.tier in examined]
        newest = self._history[0] if self._history else None
        reason = self._unrestorable(newest) if newest else None
        signatures = [found.signature for found in self._commits.values() if found]
        return Check(
            read_data=self._read_data,
            newest=newest.step if newest else None,
            restores=next((one.step for one in self._history if self._unrestorable(one) is None), None),
            reason=f"{newest.key}: {reason}" if newest and reason else None,
            tiers=tuple(state for state, _ in results),
            damages=tuple(damage for _, damages in results for damage in damages),
            signers=Counter(signature.key for signature in signatures if signature),
            unsigned=signatures.count(None),
        )

    def _tier(self, held: Holdings) -> tuple[TierChecked, list[Damage]]:
        keys = [] if held.refused else self._expected(held)
        if self._read_data:
            blobs = {blob: None for key in keys if (manifest := self._manifests[key]) for blob in manifest.blobs()}
            with ThreadPoolExecutor(READERS) as pool:
                for _ in pool.map(held.blob, blobs):
                    pass  # each answer is kept by `held`
        findings = _Findings(held, self._held)
        if keys:
            self._run_record(findings)
        for key in keys:
            self._commit(key, findings)
        now = {commit_key(*position) for position in commit_positions(held.tier.store)} if keys else set()
        damages = findings.damages(deleted={key for key in keys if key in held and key not in now})
        whole = set(keys) - {key for damage in damages for key in damage.needed_by}
        alone = [one.step for one in self._ranked if isinstance(one, Commit) and one.key in whole]
        state = TierChecked(
            tier=held.tier.name,
            commits=len(keys),
            whole=len(whole),
            restores=max(alone, default=None),
            refused=held.refused,
        )
        return state, damages

    def _expected(self, held: Holdings) -> list[str]:
        keys = [one.key for one in self._ranked if one.key in held]
        if held.tier == self._tiers.primary:
            history = [one.key for one in self._history]
            keys += history[: next((index for index, key in enumerate(history) if key in held), len(history))]
        return keys

    def _run_record(self, findings: "_Findings") -> None:
        name, copies = findings.held.tier.name, run_ids(self._tiers)
        if any(copies.values()) and copies.get(name) is None:
            what = "can't be read" if name in copies else "missing"
            findings.add(RUN_KEY, what, None, lambda held: copies.get(held.tier.name) is not None)

    def _commit(self, key: str, findings: "_Findings") -> None:
        here, number = findings.held, parse_commit_key(key)[1]
        findings.add(key, here.record(Commit, key), key, lambda held: held.record(Commit, key) is None)
        attempt = attempt_key(number)
        findings.add(attempt, here.record(Attempt, attempt), key, lambda held: held.record(Attempt, attempt) is None)
        commit, manifest = self._commits[key], self._manifests[key]
        if commit is None:
            return
        named = commit.manifest
        findings.add(manifest_key(named), here.manifest(named), key, lambda held: held.manifest(named) is None)
        for blob in manifest.blobs() if manifest else ():
            findings.add(blob.key, here.blob(blob), key, partial(_has_blob, blob))

    def _unrestorable(self, one: Commit | Rejected) -> str | None:
        """Why no tiers together restore it; None if they do."""
        if isinstance(one, Rejected):
            return one.reason
        manifest = self._manifests[one.key]
        if manifest is None:
            return f"{manifest_key(one.manifest)} is whole on no tier"
        for blob in manifest.blobs():
            if not any(_has_blob(blob, held) for held in self._held):
                return f"{blob.key} is whole on no tier"
        return None


class _Findings:
    """What is wrong on one tier, each key once."""

    def __init__(self, held: Holdings, all_held: Sequence[Holdings]) -> None:
        self.held = held
        self._others = [other for other in all_held if other is not held]
        self._what: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._needed_by: dict[str, list[str]] = {}

    def add(self, key: str, what: str | None, needed_by: str | None, has: Callable[[Holdings], bool]) -> None:
        """`what` is wrong with `key`, which the commit `needed_by` needs (None: all do); nothing if `what` is None."""
        if what is None:
            return
        if key not in self._what:
            self._what[key] = (what, tuple(other.tier.name for other in self._others if has(other)))
        self._needed_by.setdefault(key, []).extend([needed_by] if needed_by else [])

    def damages(self, deleted: Set[str]) -> list[Damage]:
        """All of it but what only commits need that retention has deleted since the tier was listed."""
        found = []
        for key, (what, elsewhere) in self._what.items():
            needed_by = tuple(one for one in self._needed_by[key] if one not in deleted)
            if needed_by or not self._needed_by[key]:
                damage = Damage(tier=self.held.tier.name, key=key, what=what, needed_by=needed_by, elsewhere=elsewhere)
                found.append(damage)
        return found


def _has_blob(blob: Blob, held: Holdings) -> bool:
    return held.blob(blob) is None


def _run_id(data: bytes) -> str | None:
    """None if it can't be read."""
    try:
        return str(from_json(data)["run_id"])
    except (ValueError, TypeError, KeyError):
        return None
