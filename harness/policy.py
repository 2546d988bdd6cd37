"""Whether another attempt is due, when, and from which checkpoint: pure functions of the run's journal.

Nothing is remembered outside the journal, so a supervisor that was killed and started again decides as the one before
it would have. Only what a supervisor itself ended with (`run.stopped`) wipes the slate: whoever starts the run after
that knows what happened.
"""

import math
import signal
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

from tenacity import RetryCallState, Retrying, wait_exponential, wait_random

from checkpointing.errors import AttemptsExhausted, HarnessError, NonFinite, NoProgress, Poisoned, Preempted
from checkpointing.events import AttemptEnded, EngineLost, GenerationRejected, RunStopped, StepDone
from checkpointing.journal import Record
from checkpointing.progress import OUTSIDE_STEPS
from harness.config import Supervision

NO_PROGRESS = 5
"""Attempts in a row without a step that no attempt before had done: whatever ends them, another one will not help."""

MAX_BACKOFF = 300.0
"""Seconds."""

HOUR = 3600.0


class Failure(NamedTuple):
    """An attempt that ended and should not have."""

    time: float
    """Unix seconds."""
    way: str
    """`exit code 17`, `SIGKILL`"""
    step: int
    phase: str
    """Where the step loop was last heard of."""
    progressed: bool
    """It did a step that no attempt before had done."""
    reason: str


class Again(NamedTuple):
    """Start another attempt after `wait` seconds."""

    wait: float = 0.0
    instead: HarnessError | None = None
    """The newest checkpoint is not to be resumed from, for this reason; raise it if there is no older one."""


def failures(records: Sequence[Record]) -> list[Failure]:
    """The attempts that failed since a supervisor last stopped by itself, oldest first.

    [] if an attempt after them got further: it was told to stop, or was ended with its supervisor. They have been
    answered, and the checkpoints that it made are not to blame.
    """
    found: list[Failure] = []
    best, progressed = 0, False
    for record in records:
        match record.event:
            case StepDone(step=step) if step > best:
                best, progressed = step, True
            case RunStopped():
                found.clear()
            case AttemptEnded() as ended if ended.exit_code not in (0, Preempted.exit_code):
                way = f"exit code {ended.exit_code}" if ended.signal is None else signal.Signals(ended.signal).name
                place = (ended.step or 0, ended.phase or "start")
                found.append(Failure(record.time, way, *place, progressed, ended.reason))
                progressed = False
    return [] if progressed else found


def next_attempt(failed: Sequence[Failure], limits: Supervision, now: float) -> Again:
    """What follows the last of `failed`, at the Unix time `now`.

    A place that fails again and again after the same checkpoint is taken for a consequence of it: an older one is tried
    once, then the run stops. A start or a restore that fails says nothing about any step: it only counts as an attempt.

    Raises:
        AttemptsExhausted: more attempts failed within an hour than the config allows.
        NoProgress: `NO_PROGRESS` attempts in a row got no step further.
        Poisoned: a step failed after an older checkpoint too.
        NonFinite: so did its numbers, or the config says to stop at once.
    """
    if not failed:
        return Again()
    last = failed[-1]
    alike = _in_a_row(failed, lambda one: (one.way, one.step, one.phase) == (last.way, last.step, last.phase))
    verdict, tries = _verdict(last, alike, limits)
    if alike > tries:
        raise verdict
    stalled = _in_a_row(failed, lambda one: not one.progressed)
    if stalled >= NO_PROGRESS:
        raise NoProgress(f"{stalled} attempts in a row got no step further; the last: {last.reason}")
    recent = sum(now - one.time < HOUR for one in failed)
    if recent > limits.restarts_per_hour:
        raise AttemptsExhausted(f"{recent} attempts failed within an hour; the last: {last.reason}")
    return Again(_backoff(stalled, limits.backoff_seconds), verdict if alike == tries else None)


def engines_to_blame(records: Sequence[Record], attempt: int) -> bool:
    """Whether `attempt` or one after it gave up on malformed answers: engines that are alive, and no good any more."""
    return any(
        record.attempt >= attempt and isinstance(record.event, GenerationRejected) and record.event.given_up
        for record in records
    )


def engines_lost(records: Sequence[Record], now: float) -> int:
    """Engines that were lost in the hour before `now` (Unix time), since a supervisor last stopped by itself."""
    since = takewhile(lambda record: not isinstance(record.event, RunStopped), reversed(records))
    return sum(isinstance(record.event, EngineLost) and now - record.time < HOUR for record in since)


def _verdict(last: Failure, alike: int, limits: Supervision) -> tuple[HarnessError, float]:
    """What `alike` failures in the same place amount to, and how many it takes before an older checkpoint is tried."""
    if last.way == f"exit code {NonFinite.exit_code}":
        return NonFinite(last.reason), 1 if limits.on_non_finite == "restore" else 0
    tries = math.inf if last.phase in OUTSIDE_STEPS else limits.poison_after
    return Poisoned(f"step {last.step} failed {alike} times in {last.phase}: {last.reason}"), tries


def _in_a_row(failed: Sequence[Failure], alike: Callable[[Failure], bool]) -> int:
    return sum(1 for _ in takewhile(alike, reversed(failed)))


def _backoff(stalled: int, seconds: float) -> float:
    """None after an attempt that got further; then `seconds`, doubled each time, and up to `seconds` of jitter."""
    if stalled == 0:
        return 0.0
    state = RetryCallState(Retrying(), None, (), {})
    state.attempt_number = stalled
    return float((wait_exponential(multiplier=seconds, max=MAX_BACKOFF) + wait_random(0, seconds))(state))
