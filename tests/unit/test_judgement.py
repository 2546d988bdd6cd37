"""One planted defect a line: each turns a drill red, or inconclusive, under its right name; and a clean run passes."""

from collections.abc import Callable
from typing import Any

import pytest

from chaos.drill import Expectations
from chaos.judgement import Judgement, judge
from chaos.plan import FaultPlan, PlannedFault
from checkpointing.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    EngineLost,
    Event,
    FaultWitnessed,
    RunFinished,
    RunStarted,
    RunStopped,
    StateRestored,
    StepDone,
    TopologyChanged,
)
from checkpointing.journal import Record

from .test_verdict import PLANNED, STATE, altered, replace, restored, step_done, without

Records = list[Record]
Change = Callable[[Records], Records]

KILL = PlannedFault(fault="kill", target="policy:1", at="train.optimizer", step=3)
PLAN = FaultPlan(faults=(KILL,))
SEEN = FaultWitnessed(
    index=0, fault="kill", target="policy:1", phase="train.optimizer", step=3, pid=7, evidence="pid 7 has gone"
)
KILLED = AttemptEnded(exit_code=17, signal=None, reason="a rank died")
DONE = AttemptEnded(exit_code=0, signal=None, reason="complete")


def numbered(*events: tuple[int, Event]) -> Records:
    """Ten seconds from one to the next."""
    return [Record(n, n * 10.0, attempt, "any", event) for n, (attempt, event) in enumerate(events)]


def alone(run_id: str) -> Records:
    steps = [(1, step_done(step)) for step in range(1, PLANNED + 1)]
    return numbered(
        (1, RunStarted(run_id=run_id, config_digest="c", planned_steps=PLANNED)),
        (1, AttemptStarted(pid=1, resumed_from=None, world_size=2)),
        *steps,
        (1, RunFinished(planned_steps=PLANNED, last_step=PLANNED)),
        (1, DONE),
    )


def survived() -> Records:
    """Steps 1 and 2, killed in step 3, then from the commit of step 1: 2 3 4 5."""
    return numbered(
        (1, RunStarted(run_id="faulted", config_digest="c", planned_steps=PLANNED, faults_planned=1)),
        (1, AttemptStarted(pid=1, resumed_from=None, world_size=2)),
        (1, step_done(1)),
        (1, CheckpointCommitted(step=1, commit="commits/1", bytes_total=1, seconds=1.0)),
        (1, step_done(2)),
        (1, KILLED),
        (1, SEEN),
        (2, AttemptStarted(pid=2, resumed_from=1, world_size=2)),
        (2, restored(1)),
        *[(2, step_done(step)) for step in range(2, PLANNED + 1)],
        (2, RunFinished(planned_steps=PLANNED, last_step=PLANNED)),
        (2, DONE),
    )


def judged(
    faulted: Records,
    again: Records | None = None,
    baseline: Records | None = None,
    plan: FaultPlan = PLAN,
    **expect: Any,
) -> Judgement:
    return judge(baseline or alone("a"), again or alone("b"), faulted, plan, Expectations(**expect))


def test_a_run_that_survives_passes() -> None:
    found = judged(survived(), seconds_down=40.0, steps_repeated=1)
    assert found.outcome == "passed", found.reasons
    assert (found.exit_code, found.steps_compared, found.first_difference) == (0, PLANNED, None)
    assert [one.resumed_from for one in found.recoveries] == [1]


def of(change: Callable[[Event], Event | None], attempt: int | None = None) -> Change:
    """Each event of `attempt`, or of all, becomes what `change` says; None leaves it out."""

    def apply(records: Records) -> Records:
        kept = []
        for record in records:
            event = change(record.event) if attempt in (None, record.attempt) else record.event
            if event is not None:
                kept.append(record._replace(event=event))
        return kept

    return apply


def step(number: int, change: Callable[[StepDone], StepDone | None]) -> Callable[[Event], Event | None]:
    return lambda event: change(event) if isinstance(event, StepDone) and event.step == number else event


def wrong(entry: str, at: int = 4) -> Change:
    return of(step(at, lambda done: altered(done, entry, f"wrong {entry}")), attempt=2)


def left_out(entry: str) -> Change:
    return of(step(4, lambda done: altered(done, entry, None)), attempt=2)


def repeated(at: int) -> Change:
    def apply(records: Records) -> Records:
        (place,) = [
            n for n, r in enumerate(records) if r.attempt == 2 and isinstance(r.event, StepDone) and r.event.step == at
        ]
        return [*records[: place + 1], records[place], *records[place + 1 :]]

    return apply


def resumed_from(number: int | None) -> Change:
    def change(event: Event) -> Event:
        return event.model_copy(update={"resumed_from": number}) if isinstance(event, AttemptStarted) else event

    return of(change, attempt=2)


def holds(**entries: str | None) -> Change:
    def change(event: Event) -> Event:
        if not isinstance(event, StateRestored):
            return event
        held = {k: v for k, v in (event.entries | {k.replace("__", "/"): v for k, v in entries.items()}).items() if v}
        return event.model_copy(update={"entries": held})

    return of(change)


def drop(*kinds: type) -> Change:
    return lambda records: without(records, *kinds)


def swapped_restore(records: Records) -> Records:
    """It says step 2 and brings back step 1, in whole."""
    return replace(records, lambda r: restored(1) if isinstance(r.event, StateRestored) else r.event)


def one_bit(records: Records) -> Records:
    """The first tensor of the parameters is off; the entry's digest with it."""

    def change(done: StepDone) -> StepDone:
        table = {"policy/parameters": {"lora_a": "wrong", "lora_b": f"lora_b@{done.step}"}}
        return altered(done, "policy/parameters", "wrong").model_copy(update={"tensors": done.tensors | table})

    return of(step(4, change), attempt=2)(records)


DEFECTS: list[tuple[str, Change, str, str]] = [
    # (defect, what it does to the journal, name of the reason, what the reason must say)
    ("an epoch off by one", wrong("epoch"), "diverged", "step 4: epoch"),
    ("a prompt skipped, or trained twice", wrong("prompts"), "diverged", "step 4: prompts"),
    ("a generation of the wrong step", wrong("tokens"), "diverged", "step 4: tokens"),
    ("an adapter loaded twice", wrong("logprobs"), "diverged", "step 4: logprobs"),
    ("a reward computed otherwise", wrong("rewards"), "diverged", "step 4: rewards"),
    ("a loss that is another", wrong("loss"), "diverged", "step 4: loss"),
    *[(f"{entry} is off", wrong(entry), "diverged", f"step 4: {entry}") for entry in STATE],
    *[(f"{entry} is left out", left_out(entry), "diverged", f"step 4: {entry}") for entry in STATE],
    ("a tensor off by one bit", one_bit, "diverged", "policy/parameters, tensor lora_a"),
    ("a step skipped", of(step(4, lambda _: None), attempt=2), "step skipped", "step 5 right after step 3"),
    ("a step trained twice", repeated(4), "trained twice", "did step 4 when it had done step 4"),
    ("a step done again without saying so", resumed_from(2), "trained twice", "did step 2 when it had done step 2"),
    ("a restore from an older step than reported", resumed_from(2), "restored another step", "restored step 1"),
    ("a restore that did not happen", drop(StateRestored), "not restored", "restored nothing"),
    ("steps of an attempt that never began", of(lambda e: None if isinstance(e, AttemptStarted) else e, 2),
     "no attempt", "which never began"),
    ("an attempt whose record was lost", lambda r: [one._replace(attempt=1) for one in r],
     "same attempt", "attempt 1 began twice"),
    ("a fresh optimizer", holds(policy__optimizer="fresh"), "restored wrongly", "policy/optimizer was"),
    ("RNG of another rank", holds(policy__rng="of rank 0"), "restored wrongly", "policy/rng was"),
    ("an entry that was not restored", holds(policy__lr_scheduler=None), "restored wrongly", "is not there"),
    ("a run that ends with an error", lambda r: [*r, r[-1]._replace(event=RunStopped(exit_code=24, reason="poison"))],
     "exit code", "ended with 24, 0 expected"),
    ("a run that never ends", drop(RunFinished), "exit code", "ended with None"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "name", "says"), [d[1:] for d in DEFECTS], ids=[d[0] for d in DEFECTS])
def test_a_defect_turns_it_red(change: Change, name: str, says: str) -> None:
    found = judged(change(survived()))
    assert (found.outcome, found.exit_code) == ("failed", 20)
    assert any(reason.name == name and says in reason.text for reason in found.failures), found.failures


def test_the_cause_is_named_and_not_what_follows() -> None:
    found = judged(wrong("policy/rng", at=3)(wrong("tokens", at=4)(survived())))
    assert found.first_difference is not None
    assert (found.first_difference.step, found.first_difference.entry) == (3, "policy/rng")


LIMITS: list[tuple[dict[str, Any], str]] = [
    ({"seconds_down": 39.0}, "seconds down"),
    ({"steps_repeated": 0}, "steps repeated"),
    ({"exit_code": 24}, "exit code"),
]


@pytest.mark.parametrize(("expect", "name"), LIMITS)
def test_a_limit_that_is_exceeded(expect: dict[str, Any], name: str) -> None:
    found = judged(survived(), **expect)
    assert found.outcome == "failed" and name in {reason.name for reason in found.failures}


def test_a_run_that_does_not_come_back() -> None:
    found = judged([record for record in survived() if record.attempt == 1])
    assert found.outcome == "failed"
    assert {"not recovered", "exit code"} <= {reason.name for reason in found.failures}


def renamed(run_id: str) -> Change:
    return of(lambda e: e.model_copy(update={"run_id": run_id}) if isinstance(e, RunStarted) else e)


def everywhere(change: Callable[[StepDone], StepDone]) -> Change:
    return of(lambda event: change(event) if isinstance(event, StepDone) else event)


def still(done: StepDone) -> StepDone:
    return done.model_copy(update={"state": done.state | {"policy/parameters": "always"}, "tensors": {}})


def idle(done: StepDone) -> StepDone:
    return done.model_copy(update={"zero_advantages": True})


def empty(done: StepDone) -> StepDone:
    return done.model_copy(update={"state": {}, "data": {}, "scalars": {}, "tensors": {}})


def same(records: Records) -> Records:
    return records


DOUBTS: list[tuple[str, Change, Change, str]] = [
    # (why it proves nothing, what it does to the faulted run, to the second baseline, name of the reason)
    ("a fault that did nothing", drop(FaultWitnessed), same, "not witnessed"),
    ("another fault than planned", of(lambda e: e.model_copy(update={"fault": "stop"})
                                      if isinstance(e, FaultWitnessed) else e), same, "not witnessed"),
    ("baseline compared with itself", same, renamed("a"), "itself"),
    ("the faulted run is a baseline", renamed("a"), same, "itself"),
    ("baselines differ", same, of(step(4, lambda done: altered(done, "tokens", "noise"))), "baselines differ"),
    ("a baseline that was disturbed", same, lambda r: [*r, r[-1]._replace(event=KILLED)], "baseline disturbed"),
    ("a baseline that met a fault", same, lambda r: [*r, r[-1]._replace(event=SEEN)], "baseline disturbed"),
    ("a baseline that is not done", same, of(step(5, lambda _: None)), "not done"),
    ("nobody died", drop(AttemptEnded), same, "no recovery"),
    ("no start", drop(RunStarted), same, "no start"),
]  # fmt: skip


@pytest.mark.parametrize(("faulted", "again", "name"), [d[1:] for d in DOUBTS], ids=[d[0] for d in DOUBTS])
def test_what_proves_nothing_is_inconclusive(faulted: Change, again: Change, name: str) -> None:
    found = judged(faulted(survived()), again(alone("b")))
    assert (found.outcome, found.exit_code) == ("inconclusive", 21), found.reasons
    assert name in {reason.name for reason in found.doubts}, found.reasons


@pytest.mark.parametrize(
    ("change", "name"), [(still, "nothing moved"), (idle, "nothing learned"), (empty, "nothing compared")]
)
def test_runs_in_which_there_was_nothing_to_see(change: Callable[[StepDone], StepDone], name: str) -> None:
    spoil = everywhere(change)
    restart = of(lambda e: e.model_copy(update={"resumed_from": None}) if isinstance(e, AttemptStarted) else e)
    faulted = restart(without(survived(), StateRestored))
    place = next(n for n, r in enumerate(faulted) if r.attempt == 2 and isinstance(r.event, StepDone))
    faulted.insert(place, faulted[place]._replace(event=step_done(1)))
    found = judged(spoil(faulted), spoil(alone("b")), spoil(alone("a")))
    assert found.outcome == "inconclusive", found.reasons
    assert name in {reason.name for reason in found.doubts}


def short(records: Records, steps: int) -> Records:
    """As if the run had been planned with so many steps."""
    kept = [r for r in records if not (isinstance(r.event, StepDone) and r.event.step > steps)]
    planned = of(lambda e: e.model_copy(update={"planned_steps": steps}) if hasattr(e, "planned_steps") else e)
    return planned(kept)


def test_one_step_shows_nothing() -> None:
    found = judged(short(survived(), 1), short(alone("b"), 1), short(alone("a"), 1))
    assert found.outcome == "inconclusive"
    assert {"too few steps", "nothing after"} <= {reason.name for reason in found.doubts}


def test_a_fault_after_which_nothing_was_done() -> None:
    late = of(lambda e: e.model_copy(update={"step": PLANNED}) if isinstance(e, FaultWitnessed) else e)(survived())
    moved = [r._replace(attempt=2) if isinstance(r.event, FaultWitnessed) else r for r in late]
    plan = FaultPlan(faults=(KILL.model_copy(update={"step": PLANNED}),))
    found = judged(moved, plan=plan)
    assert [reason.name for reason in found.reasons] == ["nothing after"]


def test_a_plan_without_faults_proves_nothing() -> None:
    assert judged(survived(), plan=FaultPlan(faults=())).outcome == "inconclusive"


def test_recoveries_that_are_expected_must_be_there() -> None:
    keeper = KILL.model_copy(update={"target": "keeper:0"})
    seen = of(lambda e: e.model_copy(update={"target": "keeper:0"}) if isinstance(e, FaultWitnessed) else e)(survived())
    assert judged(drop(AttemptEnded)(seen), plan=FaultPlan(faults=(keeper,))).outcome == "passed"
    found = judged(seen, plan=FaultPlan(faults=(keeper,)), recoveries=2)
    assert [reason.name for reason in found.reasons] == ["no recovery"]


def test_an_engine_that_is_lost_ends_no_attempt_and_must_show() -> None:
    plan = FaultPlan(faults=(KILL.model_copy(update={"target": "engine:0"}),))
    seen = of(lambda e: e.model_copy(update={"target": "engine:0"}) if isinstance(e, FaultWitnessed) else e)(survived())
    quiet = drop(AttemptEnded)(seen)
    assert [reason.name for reason in judged(quiet, plan=plan).reasons] == ["no recovery"]
    lost = EngineLost(engine=0, reason="ended with -9", last_lines=[])
    assert judged([*quiet, quiet[-1]._replace(event=lost)], plan=plan).outcome == "passed"
    found = judged(survived(), [*alone("b"), alone("b")[-1]._replace(event=lost)])
    assert [reason.name for reason in found.reasons] == ["baseline disturbed"]


def test_a_divergence_between_noisy_baselines_is_no_failure() -> None:
    noisy = of(step(2, lambda done: altered(done, "tokens", "noise")))(alone("b"))
    found = judged(wrong("tokens")(survived()), noisy)
    assert (found.outcome, found.failures) == ("inconclusive", ())


def test_but_what_contradicts_itself_is() -> None:
    noisy = of(step(2, lambda done: altered(done, "tokens", "noise")))(alone("b"))
    assert judged(repeated(4)(survived()), noisy).outcome == "failed"


def stopped_early() -> Records:
    records = [r for r in survived() if not (r.attempt == 2 and isinstance(r.event, StepDone) and r.event.step > 3)]
    records = without(records, RunFinished)
    records[-1] = records[-1]._replace(event=AttemptEnded(exit_code=25, signal=None, reason="NaN"))
    return [*records, records[-1]._replace(event=RunStopped(exit_code=25, reason="NaN"))]


def test_a_run_that_is_to_stop_passes_if_it_does_and_was_right_until_then() -> None:
    found = judged(stopped_early(), exit_code=25)
    assert (found.outcome, found.steps_compared) == ("passed", 3), found.reasons
    assert judged(stopped_early()).outcome == "failed"
    assert judged(wrong("tokens", at=3)(stopped_early()), exit_code=25).outcome == "failed"


def changed_topology() -> Records:
    """On one rank instead of two: sums differ, and the streams of the ranks are derived anew."""
    records = wrong("policy/parameters", at=4)(holds(policy__rng="derived")(survived()))
    place = next(n for n, r in enumerate(records) if isinstance(r.event, StateRestored))
    change = TopologyChanged(step=1, before={"policy": 2}, after={"policy": 1})
    return [*records[:place], records[place]._replace(event=change), *records[place:]]


def test_another_number_of_ranks_passes_only_where_it_is_expected() -> None:
    assert judged(changed_topology(), verdict="topology changed").outcome == "passed"
    assert [r.name for r in judged(changed_topology()).doubts] == ["topology changed"]
    found = judged(survived(), verdict="topology changed")
    assert [reason.name for reason in found.reasons] == ["topology unchanged"]
    wrong_data = wrong("prompts", at=5)(changed_topology())
    assert judged(wrong_data, verdict="topology changed").outcome == "failed"
