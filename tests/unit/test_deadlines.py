"""What is a hang and what only takes long, decided without waiting: the clock and the progress are the test's own."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointing import phases
from checkpointing.progress import WIDE, Place, ProgressFile, progress_path, read_progress
from harness.config import Supervision
from harness.deadlines import LONGEST_LOOK, MULTIPLE, Deadlines, Overdue

LIMITS = Supervision(phase_seconds=10, wide_seconds=100, node_wait_seconds=0)


class Watched:
    """A driver that is where it is told to be, and a supervisor that looks once a second."""

    def __init__(self, run_dir: Path) -> None:
        self.path = progress_path(run_dir, 1)
        self.driver = ProgressFile(self.path)
        self.deadlines = Deadlines(LIMITS)
        self.now = 1000.0
        self.deadlines.begin(self.path, self.now)

    def at(self, name: str, step: int = 1, **where: object) -> None:
        self.driver.hear(name, {"step": step} | where)

    def behind(self, name: str, step: int = 1) -> None:
        thread = threading.Thread(target=self.at, args=(name, step))
        thread.start()
        thread.join()

    def wait(self, seconds: float, waits_for_engine: bool = False) -> Overdue | None:
        """Look once a second for so long; the first hang that is seen."""
        for _ in range(round(seconds)):
            self.now += 1.0
            overdue = self.deadlines.check(self.now, waits_for_engine)
            if overdue:
                return overdue
        return None

    def a_step(self, seconds: float = 2) -> None:
        for name in (
            "generate.begin",
            "reward.begin",
            "forward.begin",
            "train.begin",
            "step.trained",
            "weight_sync.begin",
        ):
            self.at(name)
            assert self.wait(seconds) is None
        self.at("weight_sync.end")
        assert self.wait(1) is None


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_a_phase_that_was_never_seen_has_the_wide_limit_then_its_own(watched: Watched) -> None:
    watched.a_step()
    assert watched.deadlines.limit("train") == 10
    watched.at("train.begin", step=2)
    assert watched.wait(9) is None
    assert watched.wait(3) == Overdue("train", 2, 11.0, 10.0)


def test_a_start_may_also_wait_for_nodes() -> None:
    deadlines = Deadlines(LIMITS.model_copy(update={"node_wait_seconds": 50.0}))
    assert (deadlines.limit("start"), deadlines.limit("restore")) == (150, 100)


def test_the_limit_grows_with_what_the_run_shows(watched: Watched) -> None:
    watched.at("train.begin")
    assert watched.wait(60) is None
    watched.at("step.trained")
    assert watched.wait(1) is None
    assert watched.deadlines.limit("train") == MULTIPLE * 60
    watched.at("train.begin", step=2)
    assert watched.wait(299) is None
    assert watched.wait(5) is not None


def test_what_goes_on_within_a_phase_is_progress(watched: Watched) -> None:
    watched.a_step()
    watched.at("generate.begin", step=2)
    for _ in range(20):
        assert watched.wait(9) is None
        watched.at("generate.request", step=2)
    assert watched.wait(60) == Overdue("generate", 2, 46.0, 45.0)


def test_a_save_longer_than_a_steps_limit_is_no_hang_and_one_longer_than_its_own_is(watched: Watched) -> None:
    watched.a_step()
    watched.at("save.wait")
    assert watched.wait(95) is None
    watched.at("save.begin")
    assert watched.wait(95) is None
    watched.at("weight_sync.begin")
    watched.at("save.begin", step=2)
    assert watched.wait(1000) == Overdue("save", 2, MULTIPLE * 95 + 1, MULTIPLE * 95)


def test_a_phase_that_waits_for_storage_keeps_the_wide_limit(watched: Watched) -> None:
    watched.at("save.begin")
    assert watched.wait(1) is None
    watched.a_step()
    watched.at("save.begin", step=2)
    assert watched.wait(99) is None
    assert watched.wait(3) == Overdue("save", 2, 101.0, 100.0)


def test_a_save_behind_training_that_never_ends_is_a_hang(watched: Watched) -> None:
    watched.behind("save.write")
    for _ in range(9):
        watched.a_step(1)
    assert watched.wait(0) is None
    watched.behind("save.committed")
    watched.a_step(1)
    watched.behind("save.write", step=2)
    for _ in range(70):
        watched.at("generate.request", step=3)
        if overdue := watched.wait(8):
            break
    assert overdue is not None and (overdue.phase, overdue.step) == ("writing", 2)


def test_start_has_the_wide_limit_even_if_nothing_was_ever_said(tmp_path: Path) -> None:
    deadlines = Deadlines(LIMITS)
    deadlines.begin(progress_path(tmp_path, 1), 0.0)
    assert all(deadlines.check(float(second)) is None for second in range(100))
    assert deadlines.place is None
    assert deadlines.check(101.0) == Overdue("start", 0, 101.0, 100.0)


def test_while_an_engine_is_started_the_step_loop_waits_and_a_save_does_not(watched: Watched) -> None:
    watched.a_step()
    watched.at("generate.begin", 2)
    assert watched.wait(9) is None
    assert watched.wait(500, waits_for_engine=True) is None
    assert watched.wait(10) is None, "it is given its whole time again"
    hang = watched.wait(1)
    assert hang is not None and (hang.phase, hang.seconds, hang.limit) == ("generate", 11, 10)
    watched.at("generate.request", 2)
    watched.behind("save.write", 2)
    hang = watched.wait(200, waits_for_engine=True)
    assert hang is not None and hang.phase == "writing"


def test_evaluation_is_its_own_phase(watched: Watched) -> None:
    watched.a_step()
    watched.at("evaluate.begin")
    watched.at("generate.request", phase="eval")
    assert watched.deadlines.check(watched.now) is None
    assert watched.deadlines.place is not None and watched.deadlines.place.phase == "evaluate"
    assert {"evaluate", "save", "start", "restore"} <= WIDE


def test_a_watcher_that_did_not_run_itself_proves_nothing(watched: Watched) -> None:
    watched.a_step()
    watched.at("train.begin", step=2)
    watched.now += 10_000.0
    assert watched.deadlines.check(watched.now) is None
    assert watched.deadlines.check(watched.now + LONGEST_LOOK) is None
    assert watched.deadlines.check(watched.now + 2 * LONGEST_LOOK) is not None


def test_the_next_attempt_begins_anew_with_what_was_learned(watched: Watched, tmp_path: Path) -> None:
    watched.a_step()
    watched.at("train.begin", step=2)
    assert watched.wait(9) is None
    watched.deadlines.begin(progress_path(tmp_path, 2), watched.now)
    assert watched.wait(90) is None
    assert watched.deadlines.limit("train") == 10


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(phases, "_watchers", [])
    path = tmp_path / "progress" / "000001.json"
    phases.watch(ProgressFile(path).hear)
    yield path


def test_what_is_written_is_what_was_reached(file: Path) -> None:
    def loop() -> Place:
        seen = read_progress(file)
        assert seen is not None
        return seen.loop

    assert (loop().phase, loop().signs) == ("start", 0)
    phases.reached("generate.begin", step=7)
    assert (loop().phase, loop().step, loop().signs) == ("generate", 7, 1)
    phases.reached("store.put_written", key="blobs/x")
    phases.reached("worker.started", role="replicator", rank=0)
    assert loop().signs == 1, "only places of the step loop count"
    size = file.stat().st_size
    phases.reached("weight_sync.end", step=7)
    assert file.stat().st_size == size, "a disk that is full by now must not stop it"
    os.truncate(file, 10)
    assert read_progress(file) is None
    assert read_progress(file.parent / "000002.json") is None
