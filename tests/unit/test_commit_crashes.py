"""Wherever a save is interrupted, the newest commit restores exactly, or the one before it; never neither."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from checkpointing.blobs import get_blob
from checkpointing.commit import Attempt, Commit, commit, start_attempt
from checkpointing.errors import CheckpointError, Fenced
from checkpointing.history import newest_restorable, valid_commits
from checkpointing.manifest import Manifest
from checkpointing.phases import STORE_PHASES
from checkpointing.store import Store, open_store

from .checkpoint_samples import Crash, late, listen, sample, save, without_fsync


class Interruption:
    """A phase listener that keeps a log of (place, key written there), and dies at the n-th place if told to."""

    def __init__(self, crash_at: int | None = None) -> None:
        self.crash_at = crash_at
        self.reached: list[tuple[str, str]] = []

    def __call__(self, name: str, where: dict[str, Any]) -> None:
        self.reached.append((name, where.get("key", "")))
        if len(self.reached) - 1 == self.crash_at:
            raise Crash

    def committed(self) -> bool:
        return any(name == "store.create_linked" and key.startswith("commits/") for name, key in self.reached)

    def renamed(self) -> set[str]:
        return {key for name, key in self.reached if name == "store.put_renamed"}


def save_second(folder: Path, heard: Interruption) -> Commit:
    """Commit step 1 in peace, then step 2 in the next attempt with `heard` listening. Returns the first commit."""
    store = open_store(str(folder))
    old = save(store, start_attempt(store, None), 1, None, payload="old")
    attempt = start_attempt(store, old)
    with pytest.MonkeyPatch.context() as patched:
        listen(patched, heard)
        try:
            save(store, attempt, 2, old, payload="new")
        except Crash:
            assert len(heard.reached) - 1 == heard.crash_at
    return old


@pytest.mark.usefixtures("unsynced")
def test_crash_point_sweep(tmp_path: Path) -> None:
    """Stop at each place of a save in turn, read as another process would, and go on as the next attempt."""
    heard = Interruption()
    save_second(tmp_path / "whole", heard)
    places = heard.reached
    assert {name for name, _ in places} == STORE_PHASES | {"save.before_manifest", "save.before_commit"}
    outcomes = []
    for index, place in enumerate(places):
        heard = Interruption(crash_at=index)
        old = save_second(tmp_path / str(index), heard)
        store = open_store(str(tmp_path / str(index)))
        found, rejected = newest_restorable(store)
        assert found and rejected == [], place
        assert (found[0] == old) == (not heard.committed()), place
        assert found[1] == sample(store, found[0].step, "old" if found[0] == old else "new"), place
        outcomes.append(found[0].step)
        # The next attempt finds nothing in its way, whatever was left behind.
        again = save(store, start_attempt(store, found[0]), 3, found[0], payload="new")
        assert newest_restorable(store) == ((again, sample(store, 3, "new")), [])
    assert outcomes == [1] * (len(places) - 1) + [2]


@dataclass(frozen=True)
class Saved:
    """What the model knows of a checkpoint: its commit, the keys it needs, and the bytes it must restore."""

    commit: Commit
    keys: frozenset[str]
    content: dict[str, bytes]


def content(store: Store, manifest: Manifest) -> dict[str, bytes]:
    return {blob.key: get_blob(store, blob) for blob in manifest.blobs()}


class Run(RuleBasedStateMachine):
    """A run that is saved, killed, resumed, damaged, and haunted by its earlier attempts.

    `history` is the model: the checkpoints of the run, oldest first. `damaged` are the keys whose bytes are not right.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.unsynced = without_fsync()
        self.unsynced.__enter__()
        self.store = open_store(self.folder.name)
        self.parent: Commit | None = None
        self.history: list[Saved] = []
        self.damaged: set[str] = set()
        self.zombies: list[tuple[Attempt, Commit | None]] = []

    def teardown(self) -> None:
        self.unsynced.__exit__(None, None, None)
        self.folder.cleanup()

    @initialize()
    def begin(self) -> None:
        self.attempt = start_attempt(self.store, None)

    @rule(payload=st.sampled_from("abc"), crash_at=st.none() | st.integers(0, 16))
    def save(self, payload: str, crash_at: int | None) -> None:
        heard = Interruption(crash_at)
        step = self.parent.step + 1 if self.parent else 1
        crashed = False
        with pytest.MonkeyPatch.context() as patched:
            listen(patched, heard)
            try:
                manifest = sample(self.store, step, payload)
                commit(self.store, self.attempt, manifest, self.parent)
            except Crash:
                crashed = True
        self.damaged -= heard.renamed()
        assert heard.committed() or crashed
        if heard.committed():
            self.parent = made = valid_commits(self.store)[0]
            assert (made.step, made.attempt) == (step, self.attempt.attempt)
            held = content(self.store, manifest)
            keys = {made.key, f"manifests/{made.manifest.digest}.json", *held}
            self.history.append(Saved(made, frozenset(keys), held))
        if crashed:
            self.restart()

    @rule()
    def restart(self) -> None:
        """The process is replaced, and may wake up later. If nothing restores, the user starts over."""
        self.zombies.append((self.attempt, self.parent))
        whole = [saved for saved in self.history if not saved.keys & self.damaged]
        self.history = self.history[: self.history.index(whole[-1]) + 1] if whole else []
        self.parent = self.history[-1].commit if self.history else None
        self.attempt = start_attempt(self.store, self.parent)

    @precondition(lambda self: self.history)
    @rule(data=st.data(), how=st.sampled_from(["flip", "cut", "delete"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        key = data.draw(st.sampled_from(sorted(data.draw(st.sampled_from(self.history)).keys)))
        path = Path(self.folder.name, key)
        if key in self.damaged:
            return
        whole = path.read_bytes()
        if how != "delete":
            path.write_bytes(whole[:-1] if how == "cut" else whole[:-1] + bytes([whole[-1] ^ 1]))
        elif not key.startswith("commits/"):  # a commit that is gone without a trace is one that never was
            path.unlink()
        else:
            return
        self.damaged.add(key)

    @precondition(lambda self: self.zombies)
    @rule(data=st.data(), too_late=st.booleans())
    def wake_a_zombie(self, data: st.DataObject, too_late: bool) -> None:
        zombie, parent = data.draw(st.sampled_from(self.zombies))
        step = parent.step + 1 if parent else 1
        heard = Interruption()
        with pytest.MonkeyPatch.context() as patched:
            listen(patched, heard)
            if too_late:
                late(self.store, zombie, step, parent)
            else:
                with pytest.raises(Fenced):
                    save(self.store, zombie, step, parent, payload="zombie")
        self.damaged -= heard.renamed()

    @invariant()
    def the_newest_whole_checkpoint_is_found_and_restores_exactly(self) -> None:
        whole = [saved for saved in self.history if not saved.keys & self.damaged]
        if self.history and not whole:
            with pytest.raises(CheckpointError, match="none of"):
                newest_restorable(self.store)
            return
        found, rejected = newest_restorable(self.store)
        assert (found[0] if found else None) == (whole[-1].commit if whole else None)
        if found:
            assert content(self.store, found[1]) == whole[-1].content
            given_up = self.history[self.history.index(whole[-1]) + 1 :]
            assert {saved.commit.key for saved in given_up} == {item.key for item in rejected if not item.abandoned}


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=25, stateful_step_count=20)
