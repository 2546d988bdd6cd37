"""When another attempt is due, when and from where, decided from hand-made journals."""

import pytest

from checkpointing.errors import AttemptsExhausted, HarnessError, NonFinite, NoProgress, Poisoned
from checkpointing.events import AttemptEnded, EngineLost, Event, GenerationRejected, RunStopped, StepDone
from checkpointing.journal import Record
from harness.config import Supervision
from harness.policy import (
    HOUR,
    MAX_BACKOFF,
    NO_PROGRESS,
    Again,
    engines_lost,
    engines_to_blame,
    failures,
    next_attempt,
)

LIMITS = Supervision(backoff_seconds=2.0)


def done(step: int) -> StepDone:
    return StepDone(
        step=step, epoch=0, seconds=1.0, digest_seconds=0.0, state={}, data={}, scalars={}, zero_advantages=False
    )


def ended(code: int, step: int = 0, phase: str = "start") -> AttemptEnded:
    """`code`: exit code, or minus a signal."""
    how = {"exit_code": None, "signal": -code} if code < 0 else {"exit_code": code, "signal": None}
    return AttemptEnded.model_validate(how | {"reason": f"said by {code}", "step": step, "phase": phase})


def journal(*events: Event, every: float = HOUR) -> list[Record]:
    """`every`: seconds between events."""
    attempts, records = 1, []
    for seq, event in enumerate(events):
        records.append(Record(seq, seq * every, attempts, "any", event))
        attempts += isinstance(event, AttemptEnded)
    return records


def decide(*events: Event, limits: Supervision = LIMITS, every: float = HOUR) -> Again:
    records = journal(*events, every=every)
    return next_attempt(failures(records), limits, records[-1].time if records else 0.0)


def test_the_first_attempt_and_what_is_no_failure() -> None:
    assert decide() == Again()
    assert decide(done(1), ended(0)) == Again()
    assert decide(*[ended(75)] * 50) == Again()


def test_after_an_attempt_that_got_further_there_is_no_wait() -> None:
    assert decide(done(1), ended(-9, 2, "train")) == Again()
    assert decide(ended(-9), done(1), ended(17, 2, "train")) == Again()
    assert decide(done(1), ended(75), ended(-9, 2, "train")) == Again(), "what was done before a pause counts"


def test_backoff_grows_with_every_attempt_that_got_no_further() -> None:
    for stalled in range(1, NO_PROGRESS):
        waits = [decide(*[ended(-9)] * stalled).wait for _ in range(20)]
        assert 2.0 * 2 ** (stalled - 1) <= min(waits) < max(waits) <= 2.0 * 2 ** (stalled - 1) + 2.0
    patient = Supervision(backoff_seconds=200.0)
    assert decide(ended(-9), ended(-9), ended(-9), limits=patient).wait <= MAX_BACKOFF + 200.0
    assert decide(ended(-9), limits=Supervision(backoff_seconds=0)).wait == 0.0


def test_attempts_without_progress_trip_a_breaker() -> None:
    again: list[Event] = [done(3), ended(-9, 4, "train"), done(2)]
    decide(*again, *[ended(-9)] * (NO_PROGRESS - 1))
    with pytest.raises(NoProgress, match="5 attempts in a row got no step further; the last: said by -9"):
        decide(*again, *[ended(-9)] * NO_PROGRESS)
    decide(*[ended(-9)] * (NO_PROGRESS - 1), done(4), ended(-9))


def test_the_budget_is_per_hour() -> None:
    often: list[Event] = [event for step in range(1, 5) for event in (done(step), ended(-9, step + 1, "train"))]
    three = Supervision(restarts_per_hour=3)
    assert decide(*often, limits=three) == Again()
    with pytest.raises(AttemptsExhausted, match="4 attempts failed within an hour; the last: said by -9"):
        decide(*often, limits=three, every=60.0)
    with pytest.raises(AttemptsExhausted):
        decide(done(1), ended(-9, 2, "train"), limits=Supervision(restarts_per_hour=0))


def test_a_step_that_fails_twice_is_tried_from_an_older_checkpoint_and_then_no_more() -> None:
    twice: list[Event] = [done(22), ended(17, 23, "train"), ended(17, 23, "train")]
    assert decide(*twice[:2]).instead is None
    instead = decide(*twice).instead
    assert isinstance(instead, Poisoned) and "step 23 failed 2 times in train: said by 17" in str(instead)
    with pytest.raises(Poisoned, match="step 23 failed 3 times"):
        decide(*twice, ended(17, 23, "train"))
    assert decide(*twice, done(23), ended(17, 24, "train")).instead is None


@pytest.mark.parametrize("second", [ended(-9, 23, "train"), ended(17, 22, "train"), ended(17, 23, "reward")])
def test_another_way_step_or_phase_is_another_failure(second: AttemptEnded) -> None:
    assert decide(done(22), ended(17, 23, "train"), second).instead is None


def test_a_start_that_fails_says_nothing_about_a_step() -> None:
    for phase in ("start", "restore", "finish"):
        assert decide(done(22), *[ended(17, 22, phase)] * 3).instead is None


def test_non_finite_goes_back_once() -> None:
    assert isinstance(decide(done(6), ended(25, 7, "step end")).instead, NonFinite)
    with pytest.raises(NonFinite, match="said by 25"):
        decide(done(6), ended(25, 7, "step end"), ended(25, 7, "step end"))
    with pytest.raises(NonFinite):
        decide(done(6), ended(25, 7, "step end"), limits=Supervision(on_non_finite="stop"))
    with pytest.raises(NoProgress):
        decide(done(9), *[ended(25, step, "step end") for step in (9, 8, 7, 6, 5, 4)])


@pytest.mark.parametrize("end", [[], [ended(75)]])
def test_a_failure_is_not_answered_again_once_an_attempt_got_further(end: list[Event]) -> None:
    """Whose end nobody saw, as its supervisor was killed with it, or which was told to stop."""
    twice: list[Event] = [done(22), ended(17, 23, "train"), ended(17, 23, "train")]
    assert decide(*twice, done(22), *end).instead is not None
    assert decide(*twice, done(22), done(23), *end) == Again()


@pytest.mark.parametrize("kind", [NoProgress, Poisoned])
def test_what_a_supervisor_stopped_for_is_not_held_against_the_next(kind: type[HarnessError]) -> None:
    stopped = RunStopped(exit_code=kind.exit_code, reason="enough")
    assert decide(*[ended(-9)] * NO_PROGRESS, stopped) == Again()
    assert decide(*[ended(17, 1, "train")] * 2, stopped, ended(17, 1, "train")).instead is None


def rejected(given_up: bool) -> GenerationRejected:
    return GenerationRejected(step=1, session="a_0", reason="no tokens", given_up=given_up)


def test_engines_are_to_blame_for_answers_that_stayed_malformed_in_this_attempt() -> None:
    assert not engines_to_blame(journal(rejected(False), done(1), ended(17)), 1)
    gave_up = journal(rejected(False), rejected(True), ended(17), done(1), ended(17))
    assert engines_to_blame(gave_up, 1) and not engines_to_blame(gave_up, 2)


def test_engines_that_were_lost_within_the_hour_and_since_the_run_was_last_stopped() -> None:
    lost = EngineLost(engine=0, reason="ended", last_lines=[])
    records = journal(lost, lost, done(1), lost, every=HOUR / 4)
    assert engines_lost(records, records[-1].time) == 3
    assert engines_lost(records, HOUR) == 2
    stopped = journal(lost, RunStopped(exit_code=18, reason="budget"), lost, every=1.0)
    assert engines_lost(stopped, 3.0) == 1
