"""What must be true of a run at every moment, whatever happens to it. The numbers are those of the design.

 1  What is under the name of a blob or manifest is what the name says.
 2  A commit appears on a tier when its manifest and blobs are there, whole.
 3  Where a tier is a disk, they would then also survive a power cut; and a commit that was acknowledged does.
 4  Whoever commits, carries or deletes has just found his attempt to be the newest; no two attempts have the same
    number.
 5  Retention leaves alone: the newest commit that is whole on a tier, the one resumed from, one that another tier still
    waits for, and every byte that a commit on the tier names.
 9  A step that is done again comes out the same. (The driver of `run.py` asks the product.)

A request that was under way when its process was cut off may arrive after the successor has begun, and nothing can call
it back. So a zombie's commit that is in no history need not be whole (2): it is never resumed from. And a deletion that
retention had decided on before the successor went back a checkpoint may take what a later tier then waits for (5), but
never the newest that is whole on its tier, nor what the newest attempt resumed from.

And beyond them: an attempt resumes from the newest commit of the history that is whole anywhere, unless it was told or
found that this one is unusable, or a zombie has made it since the attempt looked for one; what it restores is what was
saved for that step; what was whole on the last tier is never lost; no failure is repeated more often, and no run goes
on longer without a new step, than the policy allows.

All this is judged from raw bytes, by code that shares nothing with the product's.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from blake3 import blake3

from .clock import Clock, Thread
from .disk import Disk

_COMMIT = re.compile(r"commits/(\d+)-(\d+)\.json")
_ATTEMPT = re.compile(r"attempts/(\d+)\.json")


class Violation(BaseException):
    """An invariant does not hold. No product code may catch it."""


class Commit(NamedTuple):
    step: int
    attempt: int
    key: str


class Invariants:
    """`tiers`: names in order, the first is the primary; `backlog`: what may wait for each later one."""

    def __init__(self, clock: Clock, disk: Disk, root: str, tiers: Sequence[str], backlog: int) -> None:
        self._clock, self._disk, self._root = clock, disk, root
        self.tiers, self._backlog = tiers, backlog
        self.there: dict[str, dict[str, bytes]] = {tier: {} for tier in tiers}
        self.newest = dict.fromkeys(tiers, 0)
        """{tier: its highest attempt number}"""
        self.history: list[Commit] = []
        self.hurt: set[tuple[str, str]] = set()
        self._flipped: set[tuple[str, str]] = set()
        """Blobs that only show their damage to whoever reads them: retention does not."""
        self.acknowledged: set[str] = set()
        self._ever: dict[str, set[str]] = {tier: set() for tier in tiers}
        self._made: dict[str, float] = {}
        self._begun: dict[int, float] = {}
        self._blobs: dict[str, frozenset[str]] = {}
        self.resumed_from: str | None = None
        self.number = 0
        """Of the newest attempt."""
        self.unusable: set[str] = set()
        """Commits that an attempt was told, or has found, not to be usable."""
        self.away: Callable[[], bool] = lambda: False
        """Whether a tier other than the primary could not be asked lately: what only it has need not be found then."""

    # What happens

    def looked(self, tier: str) -> None:
        self._clock.current.seen[tier] = self.newest[tier]

    def changed(self, tier: str, key: str, data: bytes | None, thread: Thread | None) -> None:
        """`key` of `tier` is now `data`, or gone; `thread` did it, None if that was long ago or a fault."""
        before = self.there[tier].get(key)
        if data == before:
            return
        if data is None:
            if thread is not None:
                self._deleted(tier, key, thread)
            self.there[tier].pop(key, None)
        else:
            self.there[tier][key] = data
            self.hurt.discard((tier, key))
            self._flipped.discard((tier, key))
            self._written(tier, key, data, before, thread)
        if thread is not None:
            thread.seen.clear()

    def damaged(self, tier: str, key: str, data: bytes | None) -> None:
        self.hurt.add((tier, key))
        if key.startswith("blobs/") and data is not None and len(data) == len(self.there[tier][key]):
            self._flipped.add((tier, key))
        if data is None:
            self.there[tier].pop(key, None)
        else:
            self.there[tier][key] = data

    def power_cut(self) -> None:
        """Look at what is left on the disk, which must be all that was acknowledged."""
        tier = self.tiers[0]
        if tier != "file":
            return
        left = self._disk.files(self._root)
        for commit in self.history:
            if commit.key in self.acknowledged and commit.key in self.there[tier]:
                for key in self._needs(commit.key, tier) or ():
                    self._require(
                        (tier, key) in self.hurt or left.get(key) == self.there[tier].get(key),
                        f"3: the power cut took {key} of {commit.key}, which was acknowledged",
                    )
        self.there[tier] = left
        self.newest[tier] = max((int(m[1]) for key in left if (m := _ATTEMPT.fullmatch(key))), default=0)
        self.history = [one for one in self.history if any(one.key in self.there[name] for name in self.tiers)]
        if self.resumed_from and self.newest[tier] < self.number:
            self._set_resumed()

    def resumes(self, key: str | None, number: int, chose_at: float) -> None:
        """Attempt `number`, which resumes from `key`, chosen then, now exists: anything newer is abandoned."""
        self.number, self.resumed_from = number, key
        known = [one.key for one in self.history]
        if key is not None:
            self._require(key in known, f"4: attempt {number} resumes from {key}, which is not in the history")
        cut = known.index(key) + 1 if key is not None else 0
        for lost in self.history[cut:]:
            # Not its fault: it looked while that attempt, which was thought to be dead, had not committed this yet.
            slipped_in = self._begun[lost.attempt] <= chose_at <= self._made[lost.key]
            if lost.key not in self.unusable and not self.away() and not slipped_in:
                self._require(
                    not self.is_whole(lost), f"attempt {number} resumes from {key} although {lost.key} is whole"
                )
        del self.history[cut:]

    def given_up(self, key: str) -> None:
        """A rank could not read the commit `key`."""
        one = next((one for one in self.history if one.key == key), None)
        if one is not None and not self.away():
            self._require(not self.is_whole(one), f"{key} was rejected, and is whole")
        self.unusable.add(key)

    def restored(self, key: str, state: object, saved: object) -> None:
        self._require(state == saved, f"{key} was restored as {state!r}, and saved as {saved!r}")

    # What holds

    def is_whole(self, commit: Commit, *tiers: str) -> bool:
        """Every byte is right, on one or another of `tiers`; all of them if none is named."""
        among = tiers or self.tiers
        for tier in among:
            needs = self._needs(commit.key, tier)
            if needs is not None:
                return all(any(self._right(name, key) for name in among) for key in needs)
        return False

    def _seems_whole(self, commit: Commit, tier: str) -> bool:
        needs = self._needs(commit.key, tier)
        return needs is not None and all(self._right(tier, key) or (tier, key) in self._flipped for key in needs)

    def newest_whole(self) -> Commit | None:
        return next((one for one in reversed(self.history) if self.is_whole(one)), None)

    def _right(self, tier: str, key: str) -> bool:
        data = self.there[tier].get(key)
        if data is None or (tier, key) in self.hurt:
            return False
        return key.startswith(("commits/", "attempts/")) or _names(key, data)

    def _needs(self, key: str, tier: str) -> list[str] | None:
        """The keys that the commit `key` needs, as far as `tier` can say; None if it can't."""
        record = self.there[tier].get(key)
        if record is None or (tier, key) in self.hurt:
            return None
        manifest = f"manifests/{json.loads(record)['manifest']['digest']}.json"
        if manifest not in self._blobs:
            data = next((self.there[name][manifest] for name in self.tiers if self._right(name, manifest)), None)
            if data is None:
                return None
            self._blobs[manifest] = frozenset(_blobs_of(json.loads(data)))
        return [key, manifest, *sorted(self._blobs[manifest])]

    def _written(self, tier: str, key: str, data: bytes, before: bytes | None, thread: Thread | None) -> None:
        if key.startswith(("blobs/", "manifests/")):
            self._require(_names(key, data), f"1: {tier} holds something else under {key}")
        elif match := _ATTEMPT.fullmatch(key):
            chose_at = thread.process.chose_at if thread is not None else 0.0
            self._attempted(tier, int(match[1]), json.loads(data), before, chose_at)
        elif (match := _COMMIT.fullmatch(key)) and before is None:
            self._committed(tier, Commit(int(match[1]), int(match[2]), key), thread)
        if tier == "file":
            durable = self._disk.find(f"{self._root}/{key}")
            self._require(
                durable is None or getattr(durable, "durable", data) == data,
                f"3: {key} has its name before its bytes are on the disk",
            )

    def _attempted(self, tier: str, number: int, record: dict[str, Any], before: bytes | None, chose_at: float) -> None:
        if before is None and tier == self.tiers[0] and all(number > self.newest[name] for name in self.tiers):
            self._begun[number] = self._clock.now
            self.resumes(record["resumed_from"], number, chose_at)
        self.newest[tier] = max(self.newest[tier], number)

    def _committed(self, tier: str, commit: Commit, thread: Thread | None) -> None:
        self._ever[tier].add(commit.key)
        if thread is not None and thread.process.attempt:
            self._require_looked(thread, {tier, self.tiers[0]}, commit.key)
        if self._is_zombie(thread) and commit not in self.history:
            return
        needs = self._needs(commit.key, tier)
        self._require(needs is not None, f"2: {commit.key} is on {tier}, and its manifest is nowhere")
        for key in needs or ():
            if (tier, key) in self.hurt:
                continue
            self._require(self._right(tier, key), f"2: {commit.key} is on {tier} before {key}")
            if tier == "file" and key != commit.key:
                self._require(
                    self._disk.is_durable(f"{self._root}/{key}"),
                    f"3: {commit.key} exists, and {key} is not yet durable",
                )
        if tier == self.tiers[0] and commit not in self.history and commit.attempt == self.number:
            self.history.append(commit)
            self._made[commit.key] = self._clock.now

    def _deleted(self, tier: str, key: str, thread: Thread) -> None:
        self._require_looked(thread, {tier, self.tiers[0]}, key)
        match = _COMMIT.fullmatch(key)
        if match is None:
            users = [one for one in self.there[tier] if _COMMIT.fullmatch(one) and (tier, one) not in self.hurt]
            for user in users:
                self._require(
                    key not in (self._needs(user, tier) or ()), f"5: {key} goes, and {user} on {tier} needs it"
                )
            return
        commit = Commit(int(match[1]), int(match[2]), key)
        if commit not in self.history:
            return
        here = [one for one in self.history if one.key in self.there[tier]]
        whole = [one for one in here if self._seems_whole(one, tier)]
        self._require(bool(whole), f"5: {key} goes, and nothing is whole on {tier}")
        self._require(commit != whole[-1], f"5: {key} goes, the newest that is whole on {tier}")
        self._require(key != self.resumed_from, f"5: {key} goes, which the newest attempt resumed from")
        if tier == self.tiers[0] and not self._is_zombie(thread):
            for other, carried in self._ever.items():
                left = [one for one in here if one not in _up_to_newest(here, carried)]
                waiting = left[::-1][: self._backlog] if other != tier else []
                self._require(commit not in waiting, f"5: {key} goes, and {other} waits for it")

    def _is_zombie(self, thread: Thread | None) -> bool:
        """Whether its attempt has a successor: what it does now was under way when that one began."""
        return thread is not None and 0 < thread.process.attempt < self.number

    def _require_looked(self, thread: Thread, tiers: set[str], key: str) -> None:
        mine = thread.process.attempt
        for tier in sorted(tiers):
            self._require(tier in thread.seen, f"4: {key}: attempt {mine} did not look for a newer one on {tier}")
            seen = thread.seen[tier]
            self._require(seen <= mine, f"4: {key}: attempt {mine} goes on although {tier} has attempt {seen}")

    def _set_resumed(self) -> None:
        """The newest attempt's record went with the power: the one before it is the newest again."""
        numbers = {name: self.newest[name] for name in self.tiers}
        tier = max(numbers, key=lambda name: numbers[name])
        self.number = numbers[tier]
        record = self.there[tier].get(f"attempts/{self.number:06d}.json")
        self.resumed_from = json.loads(record)["resumed_from"] if record else None

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise Violation(otherwise)


def _up_to_newest(commits: list[Commit], carried: set[str]) -> list[Commit]:
    """Those of `commits`, oldest first, that are no newer than all that was carried."""
    last = max((index for index, one in enumerate(commits) if one.key in carried), default=-1)
    return commits[: last + 1]


def _names(key: str, data: bytes) -> bool:
    return blake3(data).hexdigest() == key.rpartition("/")[2].removesuffix(".json")


def _blobs_of(manifest: dict[str, Any]) -> set[str]:
    found = set()
    for entry in manifest["entries"].values():
        for shard in entry["shards"]:
            for part in (shard["tensors"], shard["data"]):
                if part:
                    found.add(f"blobs/{part['digest'][:2]}/{part['digest']}")
    return found
