"""What a death cost, read from hand-made journals."""

import pytest

from chaos.recovery import recoveries, useful_share
from checkpointing.events import AttemptEnded, AttemptStarted, Event, FaultWitnessed, RunStarted, StepDone
from checkpointing.journal import Record

KILLED = AttemptEnded(exit_code=None, signal=9, reason="killed")
CRASHED = AttemptEnded(exit_code=17, signal=None, reason="a rank died")
FINISHED = AttemptEnded(exit_code=0, signal=None, reason="finished")
FAULT = FaultWitnessed(
    index=0, fault="kill", target="policy:1", phase="train.optimizer", step=3, pid=7, evidence="pid 7 has gone"
)


def started(resumed_from: int | None) -> AttemptStarted:
    return AttemptStarted(pid=1, resumed_from=resumed_from, world_size=2)


def done(step: int) -> StepDone:
    return StepDone(
        step=step, epoch=0, seconds=10.0, digest_seconds=0.0, state={}, data={}, scalars={}, zero_advantages=False
    )


def journal(*events: tuple[float, int, Event]) -> list[Record]:
    return [Record(seq, time, attempt, "any", event) for seq, (time, attempt, event) in enumerate(events)]


START = RunStarted(run_id="r", config_digest="c", planned_steps=3)
KILLED_ONCE = journal(
    (0, 1, START),
    (0, 1, started(None)),
    (20, 1, done(1)),
    (30, 1, done(2)),
    (35, 1, KILLED),
    (36, 1, FAULT),
    (40, 2, started(1)),
    (65, 2, done(2)),
    (75, 2, done(3)),
    (80, 2, FINISHED),
)


def test_one_kill() -> None:
    (recovery,) = recoveries(KILLED_ONCE)
    assert (recovery.attempt, recovery.exit_code, recovery.signal) == (1, None, 9)
    assert recovery.faults == (FAULT,)
    assert (recovery.last_step, recovery.resumed_from, recovery.steps_repeated) == (2, 1, 1)
    assert recovery.seconds_down == 30  # from 35 to the end of the first step, 65


def test_run_without_a_death_has_nothing_to_recover() -> None:
    assert recoveries(journal((0, 1, START), (0, 1, started(None)), (20, 1, done(1)), (25, 1, FINISHED))) == []
    assert recoveries([]) == []


def test_killed_during_the_restore_and_again() -> None:
    """The second death lengthens the time the first one cost; steps are counted once per time they were repeated."""
    first, second = recoveries(
        journal(
            (0, 1, started(None)),
            (20, 1, done(1)),
            (30, 1, done(2)),
            (35, 1, KILLED),
            (36, 1, FAULT),
            (40, 2, started(None)),
            (50, 2, CRASHED),
            (60, 3, started(None)),
            (80, 3, done(1)),
            (90, 3, done(2)),
            (100, 3, done(3)),
        )
    )
    assert (first.steps_repeated, first.seconds_down) == (0, 45)
    assert (second.last_step, second.steps_repeated, second.seconds_down) == (2, 2, 30)
    assert (first.faults, second.faults) == ((FAULT,), ())
    assert second.exit_code == 17


def test_not_recovered() -> None:
    (recovery,) = recoveries(journal((0, 1, started(None)), (20, 1, done(1)), (25, 1, KILLED), (26, 2, started(1))))
    assert (recovery.resumed_from, recovery.seconds_down, recovery.steps_repeated) == (1, None, 0)
    (recovery,) = recoveries(journal((0, 1, started(None)), (25, 1, KILLED)))
    assert (recovery.last_step, recovery.resumed_from, recovery.seconds_down) == (0, None, None)


def test_useful_share_counts_each_step_once() -> None:
    assert useful_share(KILLED_ONCE) == pytest.approx(30 / 80)
    assert useful_share([]) == 0
    assert useful_share(KILLED_ONCE[:1]) == 0
