"""Everything is lost at once, or told to stop at once; the same run, started again, here or as a job there, goes on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from ray.job_submission import JobStatus, JobSubmissionClient

from chaos.verdict import compare
from checkpointing.errors import Preempted
from checkpointing.events import AttemptStarted, RunFinished, StepDone
from checkpointing.journal import JournalFollower, Record, read_journal
from harness.config import RunConfig
from harness.processes import SHARED_MEMORY, reap
from tests.heads import Head, until

from .conftest import REPOSITORY, assert_no_secret_of_any_process

PATIENCE = 300.0
"""Seconds for a command to get to where it is to be broken."""


class Command:
    """`harness run` on one run directory, started as often as it takes."""

    def __init__(self, config: RunConfig, path: Path) -> None:
        self.run_dir, self._config, self._log = config.run_dir, path, path.with_suffix(".log")
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
def config(configure: Callable[..., RunConfig]) -> Iterator[RunConfig]:
    config = configure("again")
    tiers = config.checkpoints.model_copy(update={"tiers": ("memory://", "file://")})
    # A cluster of its own, which ends with it.
    yield (made := config.model_copy(update={"checkpoints": tiers, "ray_address": "local"}))
    for ledger in (made.run_dir / "logs").glob("*.sessions"):
        reap(ledger)  # what outlives a job that was killed, until the run is started again


@pytest.fixture
def path(config: RunConfig, tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


@pytest.fixture
def command(config: RunConfig, path: Path) -> Iterator[Command]:
    made = Command(config, path)
    yield made
    for process in [made.process, *made.left()]:
        if process is not None and process.is_running():
            process.kill()


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    place = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    made = Head(tmp_path, place, cpus=3, gpus=2)
    yield made
    made.kill()


def submit(path: Path, url: str) -> str:
    """By a process that is gone when this returns the submission's id."""
    command = [sys.executable, "-m", "harness.cli", "submit", str(path), "--address", url]
    said = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    return said.stdout.split()[1]


def in_shared_memory() -> set[Path]:
    return {path for path in SHARED_MEMORY.rglob("*") if path.is_file()}


def test_a_job_lost_then_killed_then_told_to_stop_then_a_job_to_the_end(
    baseline: list[Record], config: RunConfig, path: Path, command: Command, head: Head
) -> None:
    submit_and_lose_the_cluster(config, path, head)

    elsewhere = in_shared_memory()  # what the cluster had of it goes with its machines
    command.start()
    command.until_step(4)
    assert command.process is not None
    assert in_shared_memory() - elsewhere, "engine, ranks and the memory tier hold some"
    before = command.left()
    command.process.kill()
    command.end()
    # The kernel ends what the supervisor itself has started; what those have started is still there.
    orphans = [process for process in before if process.is_running()]
    assert orphans

    command.start()
    command.until_step(7)
    assert [process for process in before if process.is_running() and process.status() != "zombie"] == []
    # As in a container that is stopped: everyone is told, one after the other.
    for process in [command.process, *command.process.children(recursive=True)]:
        process.send_signal(signal.SIGTERM)
    assert command.end() == Preempted.exit_code
    assert command.left() == [], "nothing outlives the command"

    submit_and_wait(path, head)
    records = read_journal(config.run_dir)
    verdict = compare(baseline, records)
    assert verdict.outcome == "identical", verdict.reasons
    assert any(isinstance(record.event, RunFinished) for record in records)
    resumed = [record.event.resumed_from or 0 for record in records if isinstance(record.event, AttemptStarted)]
    assert len(resumed) == 4 and resumed[0] == 0 and resumed[1] >= 1 and resumed[2] >= 3 and resumed[3] >= 6, resumed
    assert command.left() == []
    assert in_shared_memory() <= elsewhere
    assert_no_secret_of_any_process(config.run_dir)


def submit_and_lose_the_cluster(config: RunConfig, path: Path, head: Head) -> None:
    head.start()
    first, jobs = submit(path, head.url), JobSubmissionClient(head.url)
    steps, done = JournalFollower(config.run_dir), [0]

    def has_done_two() -> bool:
        done.extend(record.event.step for record in steps.new() if isinstance(record.event, StepDone))
        return max(done) >= 2

    until(has_done_two, lambda: jobs.get_job_logs(first))
    head.kill()


def submit_and_wait(path: Path, head: Head) -> None:
    """To another cluster, which has not heard of it. What is left when that cluster is gone is not the run's."""
    head.start()
    second, jobs = submit(path, head.url), JobSubmissionClient(head.url)
    assert second.endswith("-1")
    until(lambda: jobs.get_job_status(second).is_terminal(), lambda: jobs.get_job_logs(second))
    assert jobs.get_job_status(second) == JobStatus.SUCCEEDED, jobs.get_job_logs(second)[-2000:]
    head.kill()
