"""What each death of a run cost: pure functions of its journal, in the order it was written, and its phase trace."""

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from checkpointing.events import AttemptEnded, AttemptStarted, FaultWitnessed, HangDetected, StateRestored, StepDone
from checkpointing.journal import Record
from checkpointing.trace import Mark


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
    """The step that the next attempt restored, after all fall-backs; also None where that one started anew."""
    seconds_down: float | None
    """From the supervisor's noticing to the end of the first step done after it, in whichever attempt."""
    steps_repeated: int
    """Steps done until the next death that had been done before."""


def recoveries(records: Sequence[Record]) -> list[Recovery]:
    """One for each attempt that did not end with exit code 0."""
    return [_recovery(records, *ended) for ended in _select(records, AttemptEnded) if ended[1].exit_code != 0]


class Part(BaseModel):
    """A stretch of a recovery, in Unix seconds.

    detect      from the fault, or from the silence that became a hang, until the supervisor knows that the attempt is
                lost; where that is because its driver ended, all its processes are gone by then
    stop        of an attempt that hung, until all its processes are gone
    start       until the next attempt has begun: backoff, engines that are missing, a new driver
    rebuild     ranks and models
    restore     the State of the commit
    first step  until a step is done
    """

    model_config = ConfigDict(frozen=True)

    name: Literal["detect", "stop", "start", "rebuild", "restore", "first step"]
    begin: float
    end: float


def parts(records: Sequence[Record], attempt: int, trace: Sequence[Mark] = ()) -> list[Part]:
    """The recovery from the death of `attempt`, without gaps, until a step was done or the next attempt died as well.

    Left out: what has not happened, restore where there was no commit, detect where neither the journal nor the trace
    tells when it began. Raises StopIteration if that attempt has no end.
    """
    death = next(record for record, _ in _select(records, AttemptEnded) if record.attempt == attempt)
    hang = next(((r.time, e.seconds) for r, e in _select(records, HangDetected) if r.attempt == attempt), None)
    times = [struck(fault, records, trace) for fault in faults_of(records, attempt, trace)]
    begin = max((time for time in times if time is not None), default=hang[0] - hang[1] if hang else death.time)
    ends = [("detect", hang[0]), ("stop", death.time)] if hang else [("detect", death.time)]
    ends += _comeback(records, attempt)
    found = []
    for name, end in ends:
        if end > begin:
            found.append(Part.model_validate({"name": name, "begin": begin, "end": end}))
            begin = end
    return found


def _comeback(records: Sequence[Record], attempt: int) -> list[tuple[str, float]]:
    """What came after the death of `attempt`: (part, when it ended)."""
    ends: list[tuple[str, float]] = []
    for record in records:
        match record.event:
            case _ if record.attempt <= attempt:
                continue
            case AttemptStarted() if not ends:
                ends.append(("start", record.time))
            case StateRestored(seconds=seconds):
                ends += [("rebuild", record.time - seconds), ("restore", record.time)]
            case StepDone(seconds=seconds, digest_seconds=digest):
                rebuilt = [] if ends[-1][0] == "restore" else [("rebuild", record.time - seconds - digest)]
                return [*ends, *rebuilt, ("first step", record.time)]
            case AttemptEnded(exit_code=code):
                # Cut short in the part after the last one that was completed.
                cut = {"start": "rebuild", "restore": "first step"}[ends[-1][0]] if ends else "start"
                return ends if code == 0 else [*ends, (cut, record.time)]
    return ends


def faults_of(records: Sequence[Record], attempt: int, trace: Sequence[Mark] = ()) -> list[Record]:
    """The witnessed faults that hit `attempt`: by their time, or if no trace tells it by where they are journaled."""
    ends = {record.attempt: record.time for record, _ in _select(records, AttemptEnded)}
    end = ends.get(attempt, math.inf)
    begin = max((time for earlier, time in ends.items() if earlier < attempt), default=0.0)
    faults = [(record, struck(record, records, trace)) for record, _ in _select(records, FaultWitnessed)]
    return [r for r, time in faults if (r.attempt == attempt if time is None else begin <= time <= end)]


def struck(fault: Record, records: Sequence[Record], trace: Sequence[Mark]) -> float | None:
    """When a fault hit, in Unix seconds: when its target reached the fault's place last; if that was another process's
    place, when anybody did before the attempt in which the target died was over. None where no trace tells.

    Args:
        fault: a record of `FaultWitnessed`, one of `records`.
        trace: in the order of time.
    """
    event = fault.event
    assert isinstance(event, FaultWitnessed)
    there = [mark for mark in trace if (mark.phase, mark.step) == (event.phase, event.step)]
    own = [mark.time for mark in there if (mark.process, mark.pid) == (event.target, event.pid)]
    if own:
        return own[-1]
    lived = [mark.time for mark in trace if (mark.process, mark.pid) == (event.target, event.pid)]
    ends = [
        record.time
        for record, _ in _select(records, AttemptEnded)
        if (record.time >= lived[-1] if lived else record.attempt == fault.attempt)
    ]
    latest = min([fault.time, *ends[:1]])
    return max((mark.time for mark in there if mark.time <= latest), default=None)


class UsefulTime:
    """Time spent in steps that were kept, as a share of all time from the first record on. `take` every one, in order.

    Of a step done more than once the last one counts: the final state descends from it. The rest is starting, saving,
    evaluating, being down and doing again.
    """

    def __init__(self) -> None:
        self._kept: dict[int, float] = {}
        self._begin: float | None = None
        self._last = 0.0

    def take(self, record: Record) -> None:
        self._begin, self._last = record.time if self._begin is None else self._begin, record.time
        if isinstance(record.event, StepDone):
            self._kept[record.event.step] = record.event.seconds

    def share(self, until: float | None = None) -> float:
        """0 to 1. `until`, in Unix seconds: of a run that goes on, now; without it, the last record."""
        elapsed = (self._last if until is None else until) - (self._begin or 0.0)
        return sum(self._kept.values()) / elapsed if elapsed > 0 else 0.0


def useful_share(records: Sequence[Record]) -> float:
    """`UsefulTime` of a whole journal."""
    useful = UsefulTime()
    for record in records:
        useful.take(record)
    return useful.share()


def _recovery(records: Sequence[Record], death: Record, ended: AttemptEnded) -> Recovery:
    done_before = {step.step for record, step in _select(records, StepDone) if record.attempt <= death.attempt}
    later = [record for record in records if record.attempt > death.attempt]
    # One that finds its commit damaged falls back, and is another attempt from there on without having ended.
    until = next((record.attempt for record, _ in _select(later, AttemptEnded)), math.inf)
    starts = [start for record, start in _select(later, AttemptStarted) if record.attempt <= until]
    steps = _select(later, StepDone)
    return Recovery(
        attempt=death.attempt,
        exit_code=ended.exit_code,
        signal=ended.signal,
        faults=tuple(fault for record, fault in _select(records, FaultWitnessed) if record.attempt == death.attempt),
        last_step=max(done_before, default=0),
        resumed_from=starts[-1].resumed_from if starts else None,
        seconds_down=steps[0][0].time - death.time if steps else None,
        steps_repeated=sum(record.attempt <= until and step.step in done_before for record, step in steps),
    )


def _select[E](records: Sequence[Record], kind: type[E]) -> list[tuple[Record, E]]:
    return [(record, record.event) for record in records if isinstance(record.event, kind)]
