"""The power goes at every place of a save, a replication, a prune and a repair; what was not fsynced is gone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpointing.blobs import get_blob
from checkpointing.commit import Attempt, Commit, start_attempt
from checkpointing.errors import CheckpointError
from checkpointing.history import newest_restorable
from checkpointing.replication import repair, replicate
from checkpointing.retention import Keep, Pruner
from checkpointing.store import Store, open_store
from checkpointing.stores import posix
from checkpointing.tiers import Tier, Tiers

from .checkpoint_samples import Crash, flip, listen, save
from .power_cut import Disk


class Stage:
    """Two tiers on one disk, and a run with two commits on the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.near, self.far = open_store(str(folder / "near")), open_store(str(folder / "far"))
        self.attempt: Attempt = start_attempt(self.near, None)
        self.commits: list[Commit] = []
        for step in (1, 2):
            self.save(step)

    def save(self, step: int) -> None:
        parent = self.commits[-1] if self.commits else None
        self.commits.append(save(self.near, self.attempt, step, parent, payload=f"step {step}"))

    def tiers(self) -> Tiers:
        return Tiers([Tier("near", "", self.near), Tier("far", "", self.far)])


def saves(stage: Stage) -> None:
    stage.save(3)


def replicates(stage: Stage) -> None:
    replicate(stage.near, stage.far, stage.attempt, stage.commits[0])
    replicate(stage.near, stage.far, stage.attempt, stage.commits[1])


def prunes(stage: Stage) -> None:
    pruner = Pruner(stage.near, Keep(newest=1))
    for _ in range(3):
        pruner.prune(stage.attempt, frozenset(), {})


def repairs(stage: Stage) -> None:
    replicates(stage)
    for item in stage.near.list("blobs/"):
        flip(stage.near, item.key)
    repair(stage.tiers(), stage.tiers().tier("near"), read_data=True)


def places(folder: Path, work: Callable[[Stage], None], crash_at: int | None) -> tuple[list[str], Disk]:
    """Do `work` on a fresh stage until the power goes at place `crash_at`; every phase said is a place."""
    disk = Disk(folder)
    said: list[str] = []
    with disk.watched():
        stage = Stage(folder)

        def hear(name: str, where: dict[str, Any]) -> None:
            said.append(name)
            if len(said) - 1 == crash_at:
                raise Crash

        with pytest.MonkeyPatch.context() as patched:
            listen(patched, hear)
            try:
                work(stage)
            except Crash:
                assert crash_at is not None
    return said, disk


def restorable(store: Store) -> int | None:
    """The step of the newest checkpoint of which every byte is right; None if there never was one."""
    found, _ = newest_restorable(store)
    for blob in found[1].blobs() if found else ():
        get_blob(store, blob)
    return found[0].step if found else None


@pytest.mark.parametrize(
    ("work", "near", "far"),
    [
        (saves, {2, 3}, {None}),
        (replicates, {2}, {None, 1, 2}),
        (prunes, {2}, {None}),
        (repairs, {None, 1, 2}, {None, 1, 2}),
    ],
)
def test_the_newest_checkpoint_or_the_one_before_it(
    tmp_path: Path, work: Callable[[Stage], None], near: set[int | None], far: set[int | None]
) -> None:
    whole, _ = places(tmp_path / "whole", work, None)
    assert len(whole) > 3
    seen: set[int | None] = set()
    for index in range(len(whole)):
        _, disk = places(tmp_path / str(index), work, index)
        left = tmp_path / f"{index}-after"
        disk.lose_the_rest(left)
        stores = [open_store(str(left / name)) for name in ("near", "far")]
        place = f"{work.__name__} at {whole[index]} ({index})"
        both = Tiers([Tier(name, "", store) for name, store in zip(("near", "far"), stores, strict=True)])
        assert restorable(both) in {2, 3}, place
        if work is not repairs:  # what it repairs was damaged before
            assert restorable(stores[0]) in near, place
        assert restorable(stores[1]) in far, place
        seen.add(restorable(both))
    assert seen <= {2, 3}


def test_a_store_that_syncs_no_folders_fails_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix, "fsync_dir", lambda folder: None)
    _, disk = places(tmp_path / "broken", saves, None)
    disk.lose_the_rest(tmp_path / "after")
    assert restorable(open_store(str(tmp_path / "after" / "near"))) is None


def test_a_store_that_syncs_no_files_fails_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Disk._fsync
    monkeypatch.setattr(
        Disk, "_fsync", lambda disk, fd: real(disk, fd) if Path(f"/proc/self/fd/{fd}").is_dir() else None
    )
    _, disk = places(tmp_path / "broken", saves, None)
    disk.lose_the_rest(tmp_path / "after")
    with pytest.raises(CheckpointError, match="none of"):
        restorable(open_store(str(tmp_path / "after" / "near")))
