"""How a run is, told from its journal and its progress file alone: it need not be on this machine, or alive.

Those are in the run directory. Where that is out of reach, a store tells the little that it knows.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from checkpointing.commit import newest_attempt
from checkpointing.errors import ConfigError, Preempted
from checkpointing.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointReplicated,
    RunFinished,
    RunStarted,
    RunStopped,
    StepDone,
)
from checkpointing.history import newest_restorable
from checkpointing.journal import JournalFollower, Record
from checkpointing.progress import Place, read_progress
from harness.runs import checkpoints_of, find_run

RECENT = 20
"""Steps of one attempt that its rate is taken from."""

REWARD = "reward/avg_raw_reward"


class LastFailure(BaseModel):
    model_config = ConfigDict(frozen=True)

    attempt: int
    time: float
    step: int | None
    phase: str | None
    reason: str
    last_lines: list[str]


class Status(BaseModel):
    """Times are Unix seconds. None: not known (yet), or there is none.

    state            `running` says the journal; whether that is still true, `last_sign` tells. A store can't: `unknown`
    phase            where the step loop was last heard of
    seconds_per_step from the end of one step to the end of the next, saves and evaluations included
    newest_local     step of the newest checkpoint on the first durable tier, `newest_durable` on the last
    """

    model_config = ConfigDict(frozen=True)

    run: str
    state: Literal["running", "stopped", "complete", "unknown"] = "running"
    stopped_because: str | None = None
    phase: str | None = None
    step: int = 0
    planned: int | None = None
    attempts: int = 0
    reward: float | None = None
    seconds_per_step: float | None = None
    newest_local: int | None = None
    newest_durable: int | None = None
    last_sign: float | None = None
    expected_end: float | None = None
    last_failure: LastFailure | None = None


def status_of_store(url: str) -> Status:
    """Of the run that has its checkpoints, or copies of them, in the store at `url`: which of them would restore.

    Raises:
        ConfigError: there is none.
        CheckpointError: there are checkpoints and none restores, by presence and sizes.
        StoreError: storage refused.
    """
    tiers = find_run(url).tiers
    found, _ = newest_restorable(tiers, read_data=False)
    step = found[0].step if found else None
    return Status(run=url, state="unknown", step=step or 0, attempts=newest_attempt(tiers), newest_durable=step)


class RunView:
    """A run that is looked at again and again; each look costs what has been added since the one before it.

    Raises:
        ConfigError: `run` is no run directory.
    """

    def __init__(self, run: str) -> None:
        self._name, self._directory = run, Path(run)
        if not any((self._directory / "journal").glob("*.jsonl")):
            raise ConfigError(f"{run}: no journal there; name a run directory")
        self._journal = JournalFollower(self._directory)
        tiers = checkpoints_of(self._directory).open(self._directory)  # not asked: one may be unreachable
        self.durable = [tier.name for tier in tiers.durable]
        """Tiers that outlive a node, in order: the primary, then those that commits are carried to."""
        self._last_tier = self.durable[-1] if len(self.durable) > 1 else None
        self._planned: int | None = None
        self._attempts, self._last_sign = 0, 0.0
        self._step: StepDone | None = None
        self._local: int | None = None
        self._newest_durable: int | None = None
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)
        self._failure: LastFailure | None = None
        self._stopped: RunStopped | None = None
        self._finished = False

    def look(self, hear: Callable[[Record], None] = lambda record: None) -> Status:
        """`hear` is told every record that is new, in order."""
        for record in sorted(self._journal.new(), key=lambda record: (record.attempt, record.time)):
            self._take(record)
            hear(record)
        progress = self.place()
        state: Literal["running", "stopped", "complete"] = "stopped" if self._stopped else "running"
        if self._finished:
            state = "complete"
        pace, step = self._pace(), self._step.step if self._step else 0
        left = None if self._planned is None or pace is None or not self._recent else (self._planned - step) * pace
        reward = self._step.scalars.get(REWARD) if self._step else None
        last_sign = max(self._last_sign, progress.time if progress else 0.0)
        return Status(
            run=self._name,
            state=state,
            stopped_because=self._stopped.reason if self._stopped and state == "stopped" else None,
            phase=progress.phase if progress and state == "running" else None,
            step=step,
            planned=self._planned,
            attempts=self._attempts,
            reward=float.fromhex(reward) if reward else None,
            seconds_per_step=pace,
            newest_local=self._local,
            newest_durable=self._newest_durable if self._last_tier else self._local,
            last_sign=last_sign or None,
            expected_end=self._recent[-1][0] + left if left is not None and state == "running" else None,
            last_failure=self._failure,
        )

    def place(self) -> Place | None:
        """Where the step loop was last heard of; None if it never was."""
        paths = sorted((self._directory / "progress").glob("*.json"), key=lambda path: int(path.stem))
        seen = read_progress(paths[-1]) if paths else None
        return seen.loop if seen else None

    def _pace(self) -> float | None:
        if len(self._recent) > 1:
            (began, first), (ended, last) = self._recent[0], self._recent[-1]
            return (ended - began) / max(last - first, 1)
        return self._step.seconds if self._step else None

    def _take(self, record: Record) -> None:
        self._last_sign = max(self._last_sign, record.time)
        match record.event:
            case RunStarted() as started:
                self._planned = started.planned_steps
            case AttemptStarted() as attempt:
                # What later steps the attempt before it did or saved is not part of the run any more.
                self._attempts, self._local = record.attempt, attempt.resumed_from
                if self._newest_durable is not None:
                    self._newest_durable = min(self._newest_durable, self._local or 0)
                self._stopped = None
                self._recent.clear()
            case StepDone() as step:
                self._step = step
                self._recent.append((record.time, step.step))
            case CheckpointCommitted() as committed:
                self._local = committed.step
            case CheckpointReplicated() as copied if copied.tier == self._last_tier:
                self._newest_durable = max(self._newest_durable or 0, copied.step)
            case AttemptEnded() as ended if ended.exit_code not in (0, Preempted.exit_code):
                self._failure = LastFailure(
                    attempt=record.attempt,
                    time=record.time,
                    step=ended.step,
                    phase=ended.phase,
                    reason=ended.reason,
                    last_lines=ended.last_lines,
                )
            case RunStopped() as stopped:
                self._stopped = stopped
            case RunFinished():
                self._finished = True
