"""A run on two tiers that is saved, killed, resumed, replicated, pruned, damaged, repaired and haunted at random."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from checkpointing.blobs import get_blob
from checkpointing.commit import Attempt, Commit, commit, commit_key, start_attempt
from checkpointing.errors import CheckpointError, CorruptBlob, Fenced
from checkpointing.history import newest_restorable, valid_commits
from checkpointing.manifest import manifest_key
from checkpointing.replication import backlog, repair, replicate, undurable
from checkpointing.retention import Keep, Pruner
from checkpointing.store import Store, open_store
from checkpointing.tiers import Tier, Tiers

from .checkpoint_samples import Crash, Mortal, late, sample, save, without_fsync

LIMIT = 2
KEEP = {"file": Keep(newest=1, every=4), "s3": Keep(newest=2)}
NAMES = sorted(KEEP)
dying = st.none() | st.tuples(st.integers(0, 12), st.booleans())


@dataclass(frozen=True)
class Saved:
    """What the model knows of a checkpoint: its commit, and the keys it needs."""

    commit: Commit
    keys: frozenset[str]


class Run(RuleBasedStateMachine):
    """`history` is the model: the checkpoints of the run, oldest first. `right`: the bytes that each key must have.

    `hurt`: for each tier the keys that were damaged or deleted there and are not right again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.unsynced = without_fsync()
        self.unsynced.__enter__()
        self.stores = {name: open_store(str(self.path(name))) for name in NAMES}
        self.tiers = self.opened(self.stores["file"])
        self.parent: Commit | None = None
        self.history: list[Saved] = []
        self.right: dict[str, bytes] = {}
        self.hurt: dict[str, set[str]] = {name: set() for name in NAMES}
        self.zombies: list[tuple[Attempt, Commit | None]] = []

    def teardown(self) -> None:
        self.unsynced.__exit__(None, None, None)
        self.folder.cleanup()

    def path(self, name: str) -> Path:
        return Path(self.folder.name, name)

    def opened(self, primary: Store) -> Tiers:
        return Tiers([Tier("file", "", primary), Tier("s3", "", self.stores["s3"])])

    def holds(self, name: str, key: str) -> bool:
        path = self.path(name) / key
        return path.exists() and path.read_bytes() == self.right[key]

    def listed(self, name: str) -> set[str]:
        return {item.key for item in self.stores[name].list("")}

    @initialize()
    def begin(self) -> None:
        self.started(None)

    def started(self, resume: Commit | None) -> None:
        self.attempt = start_attempt(self.tiers, resume)
        self.right[self.attempt.key] = self.stores["file"].get(self.attempt.key)
        self.pruners = {name: Pruner(self.stores[name], KEEP[name]) for name in NAMES}
        self.pruners["file"].sweep(self.attempt)

    @rule(payload=st.sampled_from("abc"), dies=dying)
    def save(self, payload: str, dies: tuple[int, bool] | None) -> None:
        step = self.parent.step + 1 if self.parent else 1
        tiers = self.opened(Mortal(self.stores["file"], *dies or ()))
        try:
            commit(tiers, self.attempt, sample(tiers, step, payload), self.parent)
            crashed = False
        except Crash:
            crashed = True
        key = commit_key(step, self.attempt.attempt)
        if key in self.listed("file"):
            self.parent = made = next(found for found in valid_commits(self.tiers) if found.key == key)
            manifest = sample(open_store(str(self.path("expected"))), step, payload)
            self.right |= {
                blob.key: get_blob(open_store(str(self.path("expected"))), blob) for blob in manifest.blobs()
            }
            named = manifest_key(made.manifest)
            self.right |= {place: self.stores["file"].get(place) for place in (key, named)}
            self.history.append(Saved(made, frozenset({key, named, *(blob.key for blob in manifest.blobs())})))
        else:
            assert crashed
        if crashed:
            self.restart()

    @rule()
    def restart(self) -> None:
        """The process is replaced, and may wake up later. If nothing restores, the user starts over."""
        self.zombies.append((self.attempt, self.parent))
        try:
            found, _ = newest_restorable(self.tiers)
        except CheckpointError:
            found = None
        self.parent = found[0] if found else None
        commits = [saved.commit for saved in self.history]
        self.history = self.history[: commits.index(self.parent) + 1] if self.parent else []
        self.started(self.parent)

    @rule(dies=dying)
    def replicate(self, dies: tuple[int, bool] | None) -> None:
        source, target = self.stores["file"], Mortal(self.stores["s3"], *dies or ())
        waiting = backlog(source, target, LIMIT)
        assert len(waiting.pending) == LIMIT or not waiting.coalesced
        for found in waiting.pending:
            try:
                replicate(source, target, self.attempt, found)
            except CorruptBlob:
                assert self.hurt["file"]
            except Crash:
                return
        if not self.hurt["file"]:
            assert backlog(source, target, LIMIT) == ((), ())

    @rule(name=st.sampled_from(NAMES), dies=dying)
    def prune(self, name: str, dies: tuple[int, bool] | None) -> None:
        before = self.listed(name)
        present = [saved for saved in self.history if saved.keys <= before and not saved.keys & self.hurt[name]]
        pending = valid_commits(self.stores["file"]) if name == "file" else []
        there = {item.key for item in self.stores["s3"].list("commits/")}
        protected = undurable(pending, {"s3": there}, LIMIT)
        pruner = self.pruners[name]
        pruner._store = Mortal(self.stores[name], *dies or ())
        try:
            pruner.prune(self.attempt, protected, {})
        except Crash:
            self.pruners[name] = Pruner(self.stores[name], KEEP[name])
        after = self.listed(name)
        stay = {saved.commit.key for saved in present[-1:]} | protected | {self.attempt.resumed_from}
        for saved in self.history:
            if saved.commit.key in stay | after:
                assert saved.keys & before == saved.keys & after, saved.commit.key

    @precondition(lambda self: not self.hurt["file"])
    @rule()
    def nothing_leaks(self) -> None:
        store = self.stores["file"]
        pruner = Pruner(store, KEEP["file"])
        for _ in range(2):
            pruner.prune(self.attempt, frozenset(), {})
        pruner.sweep(self.attempt)
        left = [saved for saved in self.history if saved.keys <= self.listed("file")]
        if not left:
            return  # where nothing is whole nothing is deleted
        records = {item.key for item in store.list("attempts/")}
        assert self.listed("file") == records.union(*(saved.keys for saved in left))

    @precondition(lambda self: self.history)
    @rule(data=st.data(), name=st.sampled_from(NAMES), how=st.sampled_from(["flip", "cut", "delete"]))
    def damage(self, data: st.DataObject, name: str, how: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.right)))
        other = next(tier for tier in NAMES if tier != name)
        if not self.holds(name, key) or (key.startswith("attempts/") and not self.holds(other, key)):
            return
        path = self.path(name) / key
        whole = self.right[key]
        if how == "delete":
            path.unlink()
        else:
            path.write_bytes(whole[:-1] if how == "cut" else whole[:-1] + bytes([whole[-1] ^ 1]))
        self.hurt[name].add(key)

    @rule(name=st.sampled_from(NAMES), dies=dying)
    def repair(self, name: str, dies: tuple[int, bool] | None) -> None:
        before = {tier: self.listed(tier) for tier in NAMES}
        target = Tier(name, "", Mortal(self.stores[name], *dies or ()))
        try:
            repair(Tiers([target, *(tier for tier in self.tiers.all if tier.name != name)]), target, read_data=True)
        except Crash:
            return
        finally:
            assert all(before[tier] <= self.listed(tier) for tier in NAMES)
        for saved in self.history:
            if all(any(self.holds(tier, key) for tier in NAMES) for key in saved.keys):
                assert all(self.holds(name, key) for key in saved.keys)

    @precondition(lambda self: self.zombies)
    @rule(data=st.data(), name=st.sampled_from(NAMES), act=st.sampled_from(["commit", "late", "prune", "replicate"]))
    def wake_a_zombie(self, data: st.DataObject, name: str, act: str) -> None:
        zombie, parent = data.draw(st.sampled_from(self.zombies))
        step = parent.step + 1 if parent else 1
        stores = self.stores
        if act == "late":
            late(self.tiers, zombie, step, parent)
        elif act == "commit":
            with pytest.raises(Fenced):
                save(self.tiers, zombie, step, parent, payload="zombie")
        elif act == "prune":
            before = self.listed(name)
            with suppress(Fenced):  # or there is nothing that it would delete
                Pruner(stores[name], KEEP[name], stores["file"]).sweep(zombie)
            with suppress(Fenced):
                Pruner(stores[name], KEEP[name], stores["file"]).prune(zombie, frozenset(), {})
            assert self.listed(name) == before
        elif act == "replicate" and parent:
            before = self.listed("s3")
            with pytest.raises(Fenced):
                replicate(stores["file"], stores["s3"], zombie, parent)
            assert self.listed("s3") == before

    @invariant()
    def the_newest_checkpoint_that_is_whole_anywhere_restores_exactly(self) -> None:
        for name in NAMES:
            self.hurt[name] = {key for key in self.hurt[name] if not self.holds(name, key)}
        listed = self.listed("file") | self.listed("s3")
        there = [saved for saved in self.history if saved.commit.key in listed]
        whole = [saved for saved in there if all(any(self.holds(name, key) for name in NAMES) for key in saved.keys)]
        if not whole and (there or self.attempt.resumed_from):
            with pytest.raises(CheckpointError, match="none of"):
                newest_restorable(self.tiers)
            return
        found, _ = newest_restorable(self.tiers)
        assert (found[0] if found else None) == (whole[-1].commit if whole else None)
        if found:
            for blob in found[1].blobs():
                assert get_blob(self.tiers, blob) == self.right[blob.key]

    @invariant()
    def a_commit_on_a_tier_has_all_its_bytes_there(self) -> None:
        """Except for what was damaged there since: replication is never ahead of its order, and no prune of its own."""
        for name in NAMES:
            listed = self.listed(name)
            for saved in self.history:
                if saved.commit.key in listed:
                    assert all(self.holds(name, key) for key in saved.keys - self.hurt[name]), (name, saved.commit.key)


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=30, stateful_step_count=25)
