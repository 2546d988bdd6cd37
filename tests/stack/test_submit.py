"""A run that was submitted goes on when who submitted it has left, and, submitted again, when the cluster is lost."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from ray.job_submission import JobStatus, JobSubmissionClient

from chaos.verdict import compare
from checkpointing.events import AttemptStarted, StepDone
from checkpointing.journal import Record, read_journal
from harness.config import RunConfig
from harness.processes import reap
from tests.heads import Head, until

from .conftest import REPOSITORY


@pytest.fixture
def config(configure: Callable[..., RunConfig]) -> Iterator[RunConfig]:
    made = configure("submitted")
    yield made
    for ledger in (made.run_dir / "logs").glob("*.sessions"):
        reap(ledger)  # what outlives a job that was killed, until the run is started again


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    place = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    made = Head(tmp_path, place, cpus=3, gpus=2)
    try:
        made.start()
        yield made
    finally:
        made.kill()


def submit(path: Path, url: str) -> str:
    """By a process that is gone when this returns the submission's id."""
    command = [sys.executable, "-m", "harness.cli", "submit", str(path), "--address", url]
    said = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    return said.stdout.split()[1]


@pytest.mark.long
def test_submit_leave_lose_the_cluster_and_submit_again(
    baseline: list[Record], config: RunConfig, head: Head, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))

    def has_done_two() -> bool:
        return any(
            isinstance(record.event, StepDone) and record.event.step >= 2 for record in read_journal(config.run_dir)
        )

    first, jobs = submit(path, head.url), JobSubmissionClient(head.url)
    until(has_done_two, lambda: jobs.get_job_logs(first))
    head.kill()

    head.start()
    second, jobs = submit(path, head.url), JobSubmissionClient(head.url)
    assert second == first, "the new cluster has not heard of it"
    until(lambda: jobs.get_job_status(second).is_terminal(), lambda: jobs.get_job_logs(second))
    assert jobs.get_job_status(second) == JobStatus.SUCCEEDED, jobs.get_job_logs(second)[-2000:]

    records = read_journal(config.run_dir)
    verdict = compare(baseline, records)
    assert verdict.outcome == "identical", verdict.reasons
    resumed = [record.event.resumed_from for record in records if isinstance(record.event, AttemptStarted)]
    assert len(resumed) >= 2 and resumed[0] is None and (resumed[-1] or 0) >= 1, resumed
