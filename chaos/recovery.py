"""What each death of a run cost: pure functions of its journal, given in the order it was written."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from checkpointing.events import AttemptEnded, AttemptStarted, FaultWitnessed, StepDone
from checkpointing.journal import Record


class Recovery(BaseModel):
    """One attempt that died, and how the run came back. Fields that are None: it has not come back (yet)."""

    model_config = ConfigDict(frozen=True)

    attempt: int
    """The one that died."""
    exit_code: int | None
    signal: int | None
    faults: tuple[FaultWitnessed, ...]
    """Those that hit this attempt; empty where it died by itself."""
    last_step: int
    """The highest step that the run had done by then, 0 if none."""
    resumed_from: int | None
    """The step that the next attempt restored; also None where that one started anew."""
    seconds_down: float | None
    """From the supervisor's noticing to the end of the first step done after it, in whichever attempt."""
    steps_repeated: int
    """Steps of the next attempt that had been done before."""


def recoveries(records: Sequence[Record]) -> list[Recovery]:
    """One for each attempt that did not end with exit code 0."""
    return [_recovery(records, *ended) for ended in _select(records, AttemptEnded) if ended[1].exit_code != 0]


def useful_share(records: Sequence[Record]) -> float:
    """Time spent in steps that were kept, as a share of the time from the first record to the last; 0 to 1.

    Of a step done more than once the last one counts: the final state descends from it. The rest is starting, saving,
    evaluating, being down and doing again.
    """
    kept = {step.step: step.seconds for _, step in _select(records, StepDone)}
    elapsed = records[-1].time - records[0].time if records else 0.0
    return sum(kept.values()) / elapsed if elapsed > 0 else 0.0


def _recovery(records: Sequence[Record], death: Record, ended: AttemptEnded) -> Recovery:
    done_before = {step.step for record, step in _select(records, StepDone) if record.attempt <= death.attempt}
    later = [record for record in records if record.attempt > death.attempt]
    starts, steps = _select(later, AttemptStarted), _select(later, StepDone)
    next_attempt = starts[0][0].attempt if starts else None
    return Recovery(
        attempt=death.attempt,
        exit_code=ended.exit_code,
        signal=ended.signal,
        faults=tuple(fault for record, fault in _select(records, FaultWitnessed) if record.attempt == death.attempt),
        last_step=max(done_before, default=0),
        resumed_from=starts[0][1].resumed_from if starts else None,
        seconds_down=steps[0][0].time - death.time if steps else None,
        steps_repeated=sum(record.attempt == next_attempt and step.step in done_before for record, step in steps),
    )


def _select[E](records: Sequence[Record], kind: type[E]) -> list[tuple[Record, E]]:
    return [(record, record.event) for record in records if isinstance(record.event, kind)]
