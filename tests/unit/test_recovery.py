"""What a death cost, read from hand-made journals."""

import pytest

from chaos.recovery import faults_of, parts, recoveries, struck, useful_share
from checkpointing.events import (
    AttemptEnded,
    AttemptStarted,
    Event,
    FaultWitnessed,
    HangDetected,
    RunFinished,
    RunStarted,
    StateRestored,
    StepDone,
)
from checkpointing.journal import Record
from checkpointing.trace import Mark

KILLED = AttemptEnded(exit_code=None, signal=9, reason="killed")
CRASHED = AttemptEnded(exit_code=17, signal=None, reason="a rank died")
IN_PLACE = CRASHED.model_copy(update={"in_place": True})
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


def test_what_a_fall_back_repeats_counts() -> None:
    """The attempt that finds its commit damaged does not end: it becomes the next one, from an older commit."""
    (recovery,) = recoveries(
        journal(
            (0, 1, started(None)),
            (20, 1, done(1)),
            (30, 1, done(2)),
            (35, 1, KILLED),
            (40, 2, started(2)),
            (45, 3, started(1)),
            (60, 3, done(2)),
            (70, 3, done(3)),
            (75, 3, FINISHED),
        )
    )
    assert (recovery.resumed_from, recovery.steps_repeated, recovery.seconds_down) == (1, 1, 25)


def test_not_recovered() -> None:
    (recovery,) = recoveries(journal((0, 1, started(None)), (20, 1, done(1)), (25, 1, KILLED), (26, 2, started(1))))
    assert (recovery.resumed_from, recovery.seconds_down, recovery.steps_repeated) == (1, None, 0)
    (recovery,) = recoveries(journal((0, 1, started(None)), (25, 1, KILLED)))
    assert (recovery.last_step, recovery.resumed_from, recovery.seconds_down) == (0, None, None)


def test_useful_share_counts_each_step_once() -> None:
    assert useful_share(KILLED_ONCE) == pytest.approx(30 / 80)
    assert useful_share([]) == 0
    assert useful_share(KILLED_ONCE[:1]) == 0


HUNG = HangDetected(phase="train", step=3, seconds=12.0, limit=10.0, last_lines=[])
RESTORED = StateRestored(step=1, entries={}, seconds=4.0)


def mark(time: float, process: str, phase: str = FAULT.phase, step: int = FAULT.step, pid: int = 7) -> Mark:
    return Mark(time=time, process=process, pid=pid, phase=phase, step=step)


def stretches(records: list[Record], attempt: int = 1, trace: tuple[Mark, ...] = ()) -> list[tuple[str, float, float]]:
    return [(part.name, part.begin, part.end) for part in parts(records, attempt, trace)]


def test_parts_of_a_recovery() -> None:
    records = journal(
        (0, 1, started(None)),
        (20, 1, done(1)),
        (35, 1, KILLED),
        (36, 1, FAULT),
        (40, 2, started(1)),
        (64, 2, RESTORED),
        (75, 2, done(2)),
        (90, 2, done(3)),
    )
    after = [("start", 35, 40), ("rebuild", 40, 60), ("restore", 60, 64), ("first step", 64, 75)]
    assert stretches(records) == after
    assert stretches(records, trace=(mark(33, "policy:1"),)) == [("detect", 33, 35), *after]


def test_parts_of_a_recovery_from_a_hang() -> None:
    records = journal((0, 1, started(None)), (30, 1, HUNG), (35, 1, KILLED), (36, 1, FAULT), (40, 2, started(None)))
    assert stretches(records) == [("detect", 18, 30), ("stop", 30, 35), ("start", 35, 40)]
    assert stretches(records, trace=(mark(17, "policy:1"),))[0] == ("detect", 17, 30)


def test_parts_where_no_commit_is_restored() -> None:
    """A step takes 10 seconds; what comes before the first one is building."""
    records = journal((35, 1, KILLED), (40, 2, started(None)), (65, 2, done(1)))
    assert stretches(records) == [("start", 35, 40), ("rebuild", 40, 55), ("first step", 55, 65)]


@pytest.mark.parametrize(
    ("then", "part"),
    [
        ([], ("start", 35, 50)),
        ([(40, 2, started(1))], ("rebuild", 40, 50)),
        ([(40, 2, started(1)), (44, 2, RESTORED)], ("first step", 44, 50)),
    ],
)
def test_parts_end_with_the_next_death(then: list[tuple[float, int, Event]], part: tuple[str, float, float]) -> None:
    """Its own recovery has the rest, so that no second is counted twice."""
    records = journal((35, 1, KILLED), *then, (50, 2, CRASHED), (60, 3, started(1)), (90, 3, done(1)))
    assert stretches(records)[-1] == part
    assert stretches(records, 2)[0] == ("start", 50, 60)


def test_parts_of_a_recovery_that_had_nothing_left_to_do() -> None:
    records = journal(
        (35, 1, KILLED), (40, 2, started(1)), (64, 2, RESTORED), (65, 2, RunFinished(planned_steps=1, last_step=1)),
        (66, 2, FINISHED),
    )  # fmt: skip
    assert stretches(records)[-1] == ("restore", 60, 64)


def test_a_fault_struck_where_its_target_was_last_seen() -> None:
    records = journal((35, 1, KILLED), (36, 1, FAULT), (60, 2, started(1)))
    fault = records[1]
    own, other, later = mark(30, "policy:1"), mark(34, "policy:0"), mark(70, "policy:1", pid=8)
    elsewhere = [mark(31, "policy:1", "train.forward_backward"), mark(31, "policy:1", step=2)]
    assert struck(fault, records, [own, *elsewhere, other, later]) == 30
    assert struck(fault, records, [mark(28, "policy:1"), own]) == 30
    assert struck(fault, records, elsewhere) is None


def test_a_fault_at_another_process_s_place_struck_when_that_was_reached() -> None:
    records = journal((35, 1, KILLED), (36, 1, FAULT), (60, 2, started(1)))
    lived, reached, later = mark(20, "policy:1", "save.capture"), mark(34, "keeper:0"), mark(70, "keeper:0")
    assert struck(records[1], records, [lived, reached, later]) == 34
    assert struck(records[1], records, [reached, later]) == 34, "also of a target that leaves no trace at all"
    in_place = journal((35, 1, IN_PLACE), (36, 2, started(1)), (80, 2, FINISHED), (80, 2, FAULT))
    assert struck(in_place[3], in_place, [lived, reached, later]) == 34, "not when its successor met the same place"


def test_a_fault_belongs_to_the_attempt_it_struck_in() -> None:
    """Where the driver outlived the attempt, faults are journaled when it ends, in its last one."""
    records = journal(
        (35, 1, IN_PLACE), (36, 2, started(1)), (40, 2, done(2)), (50, 2, done(3)), (60, 2, FINISHED), (60, 2, FAULT)
    )  # fmt: skip
    trace = [mark(33, "policy:1"), mark(49, "policy:1", pid=8)]
    assert [record.event for record in faults_of(records, 1, trace)] == [FAULT]
    assert faults_of(records, 2, trace) == []
    assert stretches(records, trace=tuple(trace))[0] == ("detect", 33, 35)
    assert (faults_of(records, 1), len(faults_of(records, 2))) == ([], 1)
