"""A run directory whose journal and times are made up, said by the product's own Journal."""

import json
from pathlib import Path
from typing import Any

import pytest

from checkpointing.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointReplicated,
    Event,
    RunStarted,
    StepDone,
)
from checkpointing.journal import Journal
from checkpointing.settings import Checkpoints
from harness.runs import leave_tiers
from harness.status import REWARD

from .cli_samples import harness

STARTED = RunStarted(run_id="r", config_digest="c", planned_steps=100)
LOST = AttemptEnded(
    exit_code=17, signal=None, reason="policy rank 1 died", step=4, phase="train", last_lines=["out of [red]luck[/red]"]
)


def begun(resumed_from: int | None = None) -> AttemptStarted:
    return AttemptStarted(pid=1, resumed_from=resumed_from, world_size=2)


def done(step: int, reward: float = 0.25) -> StepDone:
    scalars = {REWARD: reward.hex(), "policy_loss": (0.5).hex()}
    return StepDone(
        step=step, epoch=0, seconds=8.0, digest_seconds=0.0, state={}, data={}, scalars=scalars, zero_advantages=False
    )


def saved(step: int) -> CheckpointCommitted:
    return CheckpointCommitted(step=step, commit=f"commits/{step:010d}-000001.json", bytes_total=1, seconds=1.0)


def copied(step: int) -> CheckpointReplicated:
    return CheckpointReplicated(
        step=step, commit=f"commits/{step:010d}-000001.json", tier="file-2", bytes_new=1, seconds=1.0
    )


class Told:
    """A run directory whose journal says what the test says, at the time it says."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.now, self._monkeypatch = directory, 1_000_000.0, monkeypatch
        self._set_clock()
        leave_tiers(directory, Checkpoints(tiers=("file://", f"file://{directory / 'copy'}")))

    def _set_clock(self) -> None:
        self._monkeypatch.setattr("time.time", lambda: self.now)

    def say(self, attempt: int, *events: Event, writer: str = "driver", every: float = 10.0) -> None:
        self._set_clock()
        journal = Journal(self.directory, writer, attempt)
        for event in events:
            self.now += every
            journal.append(event)
        journal.close()

    def status(self) -> dict[str, Any]:
        told = harness("status", self.directory, "--json")
        assert told.code == 0
        seen: dict[str, Any] = json.loads(told.out)
        return seen
