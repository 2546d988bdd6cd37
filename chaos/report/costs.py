"""What the faults were, how the run came back from each death, and what that cost beside the baseline."""

import signal
from collections.abc import Sequence
from typing import NamedTuple

from chaos.recovery import Part, Recovery, faults_of, parts, recoveries, struck, useful_share
from checkpointing.events import AttemptEnded, AttemptStarted, CheckpointCommitted, FaultWitnessed, RunStarted, StepDone
from checkpointing.journal import Record
from checkpointing.trace import Mark


class FaultRow(NamedTuple):
    """`after`: seconds from the run's first record until it struck, None where no trace tells."""

    fault: FaultWitnessed
    attempt: int
    after: float | None


class RecoveryRow(NamedTuple):
    """`scale`: the longest recovery of the run, in seconds."""

    recovery: Recovery
    faults: list[FaultWitnessed]
    how: str
    reason: str
    parts: list[Part]
    scale: float

    @property
    def seconds(self) -> float:
        """Of its parts. If the next attempt died before it had done a step, the rest is that one's recovery."""
        return sum(part.end - part.begin for part in self.parts)

    @property
    def outage(self) -> float | None:
        """From the fault to the next step done, whatever died meanwhile, in seconds; None if there was none."""
        before = sum(part.end - part.begin for part in self.parts if part.name in ("detect", "stop"))
        return None if self.recovery.seconds_down is None else before + self.recovery.seconds_down


class Costs(NamedTuple):
    """One run. `repeated` steps took `repeated_seconds`; `useful` is a share, None without records."""

    attempts: int
    planned_steps: int | None
    planned_faults: int
    steps: int
    repeated: int
    repeated_seconds: float
    commits: int
    tokens_generated: int
    tokens_reused: int
    seconds: float
    useful: float


def fault_rows(records: Sequence[Record], trace: Sequence[Mark]) -> list[FaultRow]:
    begin = min([record.time for record in records] + [mark.time for mark in trace], default=0.0)
    rows = []
    for record in records:
        if isinstance(record.event, FaultWitnessed):
            time = struck(record, records, trace)
            rows.append(FaultRow(record.event, record.attempt, None if time is None else time - begin))
    return rows


def recovery_rows(records: Sequence[Record], trace: Sequence[Mark]) -> list[RecoveryRow]:
    reasons = {r.attempt: r.event.reason for r in records if isinstance(r.event, AttemptEnded)}
    found = [(recovery, parts(records, recovery.attempt, trace)) for recovery in recoveries(records)]
    scale = max((p[-1].end - p[0].begin for _, p in found if p), default=0.0) or 1.0
    rows = []
    for recovery, stretches in found:
        hit = [fault.event for fault in faults_of(records, recovery.attempt, trace)]
        faults = [event for event in hit if isinstance(event, FaultWitnessed)]
        rows.append(RecoveryRow(recovery, faults, _how(recovery), reasons[recovery.attempt], stretches, scale))
    return rows


def _how(recovery: Recovery) -> str:
    if recovery.signal is not None:
        return f"killed by {signal.Signals(recovery.signal).name}"
    return f"ended with exit code {recovery.exit_code}"


def costs(baseline: Sequence[Record], subject: Sequence[Record]) -> dict[str, Costs]:
    """{"baseline": ..., "with faults": ...}; a run without a journal is left out."""
    return {name: _costs(run) for name, run in (("baseline", baseline), ("with faults", subject)) if run}


def _costs(records: Sequence[Record]) -> Costs:
    events = [record.event for record in records]
    start = next((event for event in events if isinstance(event, RunStarted)), None)
    done = [event for event in events if isinstance(event, StepDone)]
    kept = {event.step: event for event in done}
    times = [record.time for record in records]
    return Costs(
        attempts=sum(isinstance(event, AttemptStarted) for event in events),
        planned_steps=start.planned_steps if start else None,
        planned_faults=start.faults_planned if start else 0,
        steps=len(kept),
        repeated=len(done) - len(kept),
        repeated_seconds=sum(event.seconds for event in done) - sum(event.seconds for event in kept.values()),
        commits=sum(isinstance(event, CheckpointCommitted) for event in events),
        tokens_generated=sum(event.tokens_generated for event in done),
        tokens_reused=sum(event.tokens_reused for event in done),
        seconds=max(times) - min(times),
        useful=useful_share(records),
    )
