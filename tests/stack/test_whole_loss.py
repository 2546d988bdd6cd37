"""Everything is lost at once, or told to stop at once; the same command, started again, goes on."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from chaos.verdict import compare
from checkpointing.errors import Preempted
from checkpointing.events import AttemptStarted, RunFinished, StepDone
from checkpointing.journal import JournalFollower, Record, read_journal
from harness.config import RunConfig
from harness.processes import SHARED_MEMORY

from .conftest import REPOSITORY

PATIENCE = 300.0
"""Seconds for a command to get to where it is to be broken."""


class Command:
    """`harness run` on one run directory, started as often as it takes."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.run_dir, self._config, self._log = config.run_dir, folder / "run.yaml", folder / "run.log"
        self._config.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        self._steps = JournalFollower(self.run_dir)
        self.process: psutil.Popen | None = None
        self.started: list[psutil.Process] = []
        """Every process that any of them has started, as far as it was seen."""

    def start(self) -> None:
        command = [sys.executable, "-m", "harness.cli", "run", str(self._config)]
        with self._log.open("ab") as log:
            self.process = psutil.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log, start_new_session=True)

    def until_step(self, step: int) -> None:
        """Wait until it has done `step`, and take note of all of its processes."""
        assert self.process is not None
        deadline, done = time.monotonic() + PATIENCE, 0
        while done < step:
            done = max([done, *(r.event.step for r in self._steps.new() if isinstance(r.event, StepDone))])
            assert self.process.poll() is None and time.monotonic() < deadline, self._log.read_text()[-2000:]
            time.sleep(0.1)
        self.started += self.process.children(recursive=True)

    def end(self) -> int:
        assert self.process is not None
        code: int = self.process.wait(PATIENCE)
        return code

    def left(self) -> list[psutil.Process]:
        return [process for process in self.started if process.is_running() and process.status() != "zombie"]


@pytest.fixture
def command(configure: Callable[..., RunConfig], tmp_path: Path) -> Iterator[Command]:
    config = configure("again")
    tiers = config.checkpoints.model_copy(update={"tiers": ("memory://", "file://")})
    made = Command(config.model_copy(update={"checkpoints": tiers}), tmp_path)
    yield made
    for process in [made.process, *made.left()]:
        if process is not None and process.is_running():
            process.kill()


def in_shared_memory() -> set[Path]:
    return {path for path in SHARED_MEMORY.rglob("*") if path.is_file()}


def test_killed_with_everything_then_told_to_stop_then_to_the_end(baseline: list[Record], command: Command) -> None:
    elsewhere = in_shared_memory()
    command.start()
    command.until_step(2)
    assert command.process is not None
    assert in_shared_memory() > elsewhere, "engine, ranks and the memory tier hold some"
    before = command.left()
    command.process.kill()
    command.end()
    # The kernel ends what the supervisor itself has started; what those have started is still there.
    orphans = [process for process in before if process.is_running()]
    assert orphans

    command.start()
    command.until_step(5)
    assert [process for process in before if process.is_running() and process.status() != "zombie"] == []
    # As in a container that is stopped: everyone is told, one after the other.
    for process in [command.process, *command.process.children(recursive=True)]:
        process.send_signal(signal.SIGTERM)
    assert command.end() == Preempted.exit_code
    assert command.left() == [], "nothing outlives the command"

    command.start()
    assert command.end() == 0
    records = read_journal(command.run_dir)
    verdict = compare(baseline, records)
    assert verdict.outcome == "identical", verdict.reasons
    assert any(isinstance(record.event, RunFinished) for record in records)
    resumed = [record.event.resumed_from for record in records if isinstance(record.event, AttemptStarted)]
    assert len(resumed) == 3 and resumed[0] is None and (resumed[1] or 0) >= 1 and (resumed[2] or 0) >= 4, resumed
    assert command.left() == []
    assert in_shared_memory() <= elsewhere
