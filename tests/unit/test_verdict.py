"""The verdict names every difference by its cause, and never passes what proves nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.verdict import Verdict, compare
from checkpointing.errors import VERIFY_CANNOT_TELL, VERIFY_DIFFERENT
from checkpointing.events import (
    AttemptEnded,
    AttemptStarted,
    Event,
    FaultWitnessed,
    RunFinished,
    RunStarted,
    StateRestored,
    StepDone,
)
from checkpointing.journal import Journal, Record, read_journal

DATA = ["prompts", "tokens", "logprobs", "rewards", "advantages"]
SCALARS = ["loss", "grad_norm"]
STATE = ["policy/parameters", "policy/optimizer", "policy/lr_scheduler", "policy/rng", "driver/data_position"]
CAUSES = ["epoch", *DATA, *SCALARS, *STATE]
"""In the order in which a wrong one spoils those after it."""
TABLE = {"policy/parameters": ["lora_a", "lora_b"], "policy/rng": ["rank0", "rank1"]}
PLANNED = 5

Records = list[Record]


def step_done(step: int) -> StepDone:
    return StepDone(
        step=step,
        epoch=(step - 1) // 3,
        seconds=2.0,
        digest_seconds=0.1,
        state={entry: f"{entry}@{step}" for entry in STATE},
        tensors={entry: {tensor: f"{tensor}@{step}" for tensor in tensors} for entry, tensors in TABLE.items()},
        data={entry: f"{entry}@{step}" for entry in reversed(DATA)},
        scalars={entry: (step / 3).hex() for entry in reversed(SCALARS)},
        zero_advantages=False,
    )


def restored(step: int) -> StateRestored:
    return StateRestored(step=step, entries=step_done(step).state, seconds=1.0)


def journal(run_id: str, deaths: dict[int, int] | None = None, planned: int = PLANNED, faults: int = 0) -> Records:
    """A run without defect. `deaths` is {last step done before one: step that the next attempt restores}."""
    deaths = dict(deaths or {})
    attempt, step = 1, 0
    events: list[tuple[int, Event]] = [
        (1, RunStarted(run_id=run_id, config_digest="c", planned_steps=planned, faults_planned=faults)),
        (1, AttemptStarted(pid=1, resumed_from=None, world_size=2)),
    ]
    while step < planned:
        step += 1
        events.append((attempt, step_done(step)))
        if step in deaths:
            events.append((attempt, AttemptEnded(exit_code=None, signal=9, reason="killed")))
            attempt, step = attempt + 1, deaths.pop(step)
            events.append((attempt, AttemptStarted(pid=attempt, resumed_from=step, world_size=2)))
            events.append((attempt, restored(step)))
    events.append((attempt, RunFinished(planned_steps=planned, last_step=step)))
    return [
        Record(seq=seq, time=float(seq), attempt=attempt, writer="driver", event=event)
        for seq, (attempt, event) in enumerate(events)
    ]


def resumed(**options: Any) -> Records:
    """Steps 1 2 3, then from the commit of step 2: 3 4 5."""
    return journal("resumed", {3: 2}, **options)


def replace(records: Records, change: Callable[[Record], Event]) -> Records:
    """`change` gives the event to put in a record's place."""
    return [record._replace(event=change(record)) for record in records]


def without(records: Records, *kinds: type) -> Records:
    return [record for record in records if not isinstance(record.event, kinds)]


def altered(event: StepDone, entry: str, value: str | None) -> StepDone:
    """`event` with another value of `entry`; None leaves it out. Tables are kept: they say nothing new."""
    if entry == "epoch":
        return event.model_copy(update={"epoch": event.epoch + 1})
    section = "data" if entry in DATA else "scalars" if entry in SCALARS else "state"
    values = {name: value if name == entry else old for name, old in getattr(event, section).items()}
    return event.model_copy(update={section: {name: new for name, new in values.items() if new is not None}})


def spoiled(records: Records, step: int, entry: str, attempt: int = 2) -> Records:
    """In one attempt `entry` of `step` is wrong, and so is everything computed from it."""

    def change(record: Record) -> Event:
        event = record.event
        if record.attempt != attempt or not isinstance(event, StepDone) or event.step < step:
            return event
        for name in CAUSES if event.step > step else CAUSES[CAUSES.index(entry) :]:
            event = altered(event, name, f"wrong {name}@{event.step}")
        return event

    return replace(records, change)


def badly_restored(entries: dict[str, str | None], next_wrong: str = "prompts") -> Records:
    """A resume that brought these `entries` back (None: not at all), and went wrong from `next_wrong` of step 3."""

    def change(record: Record) -> Event:
        if not isinstance(record.event, StateRestored):
            return record.event
        held = {name: digest for name, digest in (record.event.entries | entries).items() if digest is not None}
        return record.event.model_copy(update={"entries": held})

    return spoiled(replace(resumed(), change), 3, next_wrong)


def with_tensors(entry: str, table: dict[str, str] | None) -> Records:
    """At step 4 the digest of `entry` is wrong and its table is this one; None: there is no table."""

    def change(record: Record) -> Event:
        event = record.event
        if not isinstance(event, StepDone) or event.step != 4:
            return event
        tensors = {name: old for name, old in event.tensors.items() if name != entry}
        tensors |= {} if table is None else {entry: table}
        return altered(event, entry, "wrong").model_copy(update={"tensors": tensors})

    return replace(resumed(), change)


def without_step(step: int) -> Records:
    return [record for record in resumed() if not (isinstance(record.event, StepDone) and record.event.step == step)]


def named(verdict: Verdict) -> tuple[int, str, str | None, bool]:
    """Where the first difference is; the verdict must be red."""
    first = verdict.first_difference
    assert verdict.outcome == "different"
    assert verdict.exit_code == VERIFY_DIFFERENT
    assert first is not None
    return first.step, first.entry, first.tensor, first.restored


def test_uninterrupted_and_resumed_runs_are_identical() -> None:
    verdict = compare(journal("whole"), resumed())
    assert verdict.outcome == "identical"
    assert verdict.exit_code == 0
    assert verdict.reasons == ()
    assert verdict.first_difference is None
    assert verdict.steps_compared == PLANNED
    # Step 3 was done twice, and what was restored of step 2 counts too.
    assert verdict.entries_compared == (PLANNED + 1) * len(CAUSES) + len(STATE)


@pytest.mark.parametrize(
    ("entry", "value", "next_wrong"),
    [
        pytest.param("policy/parameters", "the base model's", "prompts", id="parameters not restored"),
        pytest.param("policy/optimizer", "fresh", "loss", id="fresh optimizer"),
        pytest.param("policy/lr_scheduler", "policy/lr_scheduler@3", "loss", id="scheduler stepped twice"),
        pytest.param("policy/rng", None, "prompts", id="RNG left out"),
        pytest.param("driver/data_position", "driver/data_position@0", "prompts", id="data from the start"),
    ],
)
def test_entry_left_out_of_a_restore_is_named_before_what_it_spoils(
    entry: str, value: str | None, next_wrong: str
) -> None:
    subject = badly_restored({entry: value}, next_wrong)
    assert named(compare(journal("whole"), subject)) == (2, entry, None, True)


def test_restore_of_an_older_step_than_reported() -> None:
    subject = badly_restored({**step_done(1).state})
    assert named(compare(journal("whole"), subject)) == (2, "policy/parameters", None, True)


SWAPPED = {"rank0": "rank1@4", "rank1": "rank0@4"}
ONE_BIT_OFF = {"lora_a": "lora_a@4", "lora_b": "lora_b@5"}
SHORTER = {"lora_b": "lora_b@4"}
DEFECTS: list[tuple[str, Records, int, str, str | None]] = [
    ("epoch off by one", spoiled(resumed(), 4, "epoch"), 4, "epoch", None),
    ("one prompt skipped", spoiled(resumed(), 4, "prompts"), 4, "prompts", None),
    ("generation of another step", spoiled(resumed(), 4, "tokens"), 4, "tokens", None),
    ("stale adapter in the engine", spoiled(resumed(), 4, "logprobs"), 4, "logprobs", None),
    ("reward computed otherwise", spoiled(resumed(), 4, "rewards"), 4, "rewards", None),
    ("advantages of another batch", spoiled(resumed(), 4, "advantages"), 4, "advantages", None),
    ("sums in another order", spoiled(resumed(), 4, "loss"), 4, "loss", None),
    ("gradient clipped otherwise", spoiled(resumed(), 4, "grad_norm"), 4, "grad_norm", None),
    ("optimizer altered in memory", spoiled(resumed(), 4, "policy/optimizer"), 4, "policy/optimizer", None),
    ("only what was repeated", spoiled(resumed(), 3, "tokens"), 3, "tokens", None),
    ("only before the death", spoiled(resumed(), 3, "tokens", attempt=1), 3, "tokens", None),
    ("tensor off by one bit", with_tensors("policy/parameters", ONE_BIT_OFF), 4, "policy/parameters", "lora_b"),
    ("ranks' RNG swapped", with_tensors("policy/rng", SWAPPED), 4, "policy/rng", "rank0"),
    ("tensor gone", with_tensors("policy/parameters", SHORTER), 4, "policy/parameters", "lora_a"),
    ("no table to look in", with_tensors("policy/parameters", None), 4, "policy/parameters", None),
    ("step left out", without_step(4), 4, "step", None),
    ("last step left out", without_step(5), 5, "step", None),
]


@pytest.mark.parametrize(
    ("subject", "step", "entry", "tensor"), [pytest.param(*defect[1:], id=defect[0]) for defect in DEFECTS]
)
def test_difference_is_named_by_its_cause(subject: Records, step: int, entry: str, tensor: str | None) -> None:
    verdict = compare(journal("whole"), subject)
    assert named(verdict) == (step, entry, tensor, False)
    assert verdict.reasons[0] == str(verdict.first_difference)


def test_both_values_and_the_attempt_are_reported() -> None:
    first = compare(journal("whole"), spoiled(resumed(), 4, "tokens")).first_difference
    assert first is not None
    assert (first.baseline_value, first.subject_value) == ("tokens@4", "wrong tokens@4")
    assert (first.baseline_attempt, first.attempt) == (1, 2)
    assert str(first) == "step 4: tokens: baseline (attempt 1) tokens@4, subject (attempt 2) wrong tokens@4"


def test_values_of_the_tensor_stand_in_for_those_of_its_entry() -> None:
    first = compare(journal("whole"), with_tensors("policy/parameters", ONE_BIT_OFF)).first_difference
    assert first is not None
    assert (first.baseline_value, first.subject_value) == ("lora_b@4", "lora_b@5")


def test_a_value_on_one_side_only_is_a_difference() -> None:
    def change(record: Record) -> Event:
        return altered(record.event, "grad_norm", None) if isinstance(record.event, StepDone) else record.event

    first = compare(journal("whole"), replace(resumed(), change)).first_difference
    assert first is not None
    assert (first.step, first.entry, first.subject_value) == (1, "grad_norm", None)
    assert "subject (attempt 1) has none" in str(first)


def test_a_baseline_that_disagrees_with_its_own_repetition_is_identical_to_nothing() -> None:
    noisy = spoiled(journal("noisy", {3: 2}), 3, "tokens", attempt=1)
    first = compare(noisy, journal("whole")).first_difference
    assert first is not None
    assert (first.step, first.entry, first.baseline_attempt) == (3, "tokens", 1)


@pytest.mark.parametrize("left_out", [(), (RunFinished,)])
def test_a_baseline_with_fewer_planned_steps_lacks_the_others(left_out: tuple[type, ...]) -> None:
    verdict = compare(without(journal("short", planned=4), *left_out), resumed())
    assert verdict.outcome == "different"
    assert verdict.reasons[0] == "step 5 is missing in the baseline"


def test_a_step_passed_over_is_missing_before_the_run_has_ended() -> None:
    assert named(compare(journal("whole"), cut(without_step(2), 4))) == (2, "step", None, False)


def zero_advantages(records: Records) -> Records:
    return replace(
        records,
        lambda r: r.event.model_copy(update={"zero_advantages": True}) if isinstance(r.event, StepDone) else r.event,
    )


def frozen_parameters(records: Records) -> Records:
    """Every entry moves but the parameters."""

    def change(record: Record) -> Event:
        event = record.event
        if isinstance(event, StepDone):
            return altered(event, "policy/parameters", "base").model_copy(update={"tensors": {}})
        if isinstance(event, StateRestored):
            return event.model_copy(update={"entries": event.entries | {"policy/parameters": "base"}})
        return event

    return replace(records, change)


def cut(records: Records, last_step: int) -> Records:
    """The journal of a run that has not got beyond `last_step`."""
    return [
        record
        for record in without(records, RunFinished)
        if not (isinstance(record.event, StepDone) and record.event.step > last_step)
    ]


WITNESSED = FaultWitnessed(
    index=0, fault="kill", target="policy:1", phase="train.optimizer", step=3, pid=7, evidence="pid 7 has gone"
)


def witnessed(records: Records, times: int) -> Records:
    return [*records, *[records[-1]._replace(event=WITNESSED)] * times]


INCONCLUSIVE: list[tuple[str, Records, Records, str]] = [
    ("compared with itself", journal("one"), journal("one"), "compared with itself"),
    ("a copy that differs", journal("one"), spoiled(journal("one", {3: 2}), 4, "loss"), "compared with itself"),
    ("no run.started", journal("whole"), without(resumed(), RunStarted), "no run.started"),
    ("nothing done yet", journal("whole"), cut(resumed(), 0), "no step is in both"),
    ("subject unfinished", journal("whole"), cut(resumed(), 4), "subject planned 5 steps, ran 4"),
    ("baseline unfinished", cut(journal("whole"), 4), resumed(), "baseline planned 5 steps, ran 4"),
    ("all advantages zero", zero_advantages(journal("whole")), zero_advantages(resumed()), "advantages"),
    ("no parameter moved", frozen_parameters(journal("whole")), frozen_parameters(resumed()), "no parameter"),
    ("one step only", journal("whole", planned=1), journal("resumed", planned=1), "no parameter"),
    ("fault never fired", journal("whole"), resumed(faults=1), "planned 1 faults, 0 were witnessed"),
    ("one witnessed twice", journal("whole"), witnessed(resumed(faults=2), 2), "planned 2 faults, 1 were"),
    ("fault in the baseline", journal("whole", faults=1), resumed(), "the baseline planned 1 faults"),
    ("empty journals", [], [], "no step is in both"),
]


@pytest.mark.parametrize(("baseline", "subject", "reason"), [pytest.param(*row[1:], id=row[0]) for row in INCONCLUSIVE])
def test_what_proves_nothing_is_inconclusive(baseline: Records, subject: Records, reason: str) -> None:
    verdict = compare(baseline, subject)
    assert verdict.outcome == "inconclusive"
    assert verdict.exit_code == VERIFY_CANNOT_TELL
    assert any(reason in text for text in verdict.reasons), verdict.reasons


def test_witnessed_fault_leaves_no_doubt() -> None:
    assert compare(journal("whole"), witnessed(resumed(faults=1), 1)).outcome == "identical"


def test_a_run_that_did_everything_but_say_so_is_compared() -> None:
    """Killed after its last step, before run.finished."""
    assert compare(journal("whole"), without(resumed(), RunFinished)).outcome == "identical"


def test_advantages_that_are_zero_now_and_then_are_no_doubt() -> None:
    def change(record: Record) -> Event:
        zero = isinstance(record.event, StepDone) and record.event.step != 4
        return record.event.model_copy(update={"zero_advantages": True}) if zero else record.event

    assert compare(replace(journal("whole"), change), replace(resumed(), change)).outcome == "identical"


def test_a_difference_beats_doubt_and_keeps_it() -> None:
    verdict = compare(journal("whole"), spoiled(cut(resumed(faults=1), 4), 4, "loss"))
    assert verdict.outcome == "different"
    assert "the subject planned 1 faults, 0 were witnessed" in verdict.reasons


def test_finished_without_a_step_is_different() -> None:
    """'Resumed and did nothing' ends well by its own account."""
    assert compare(journal("whole"), without(resumed(), StepDone)).outcome == "different"


def test_json_holds_the_exit_code() -> None:
    verdict = compare(journal("whole"), spoiled(resumed(), 4, "loss"))
    text = verdict.model_dump_json()
    assert '"exit_code":20' in text
    assert Verdict.model_validate_json(text) == verdict


deaths = st.dictionaries(st.integers(1, PLANNED), st.integers(1, PLANNED), max_size=3).map(
    lambda drawn: {death: min(death, step) for death, step in drawn.items()}
)


@settings(deadline=None)  # a busy machine is no defect
@given(deaths, deaths)
def test_runs_without_defect_are_identical(left: dict[int, int], right: dict[int, int]) -> None:
    verdict = compare(journal("left", left), journal("right", right))
    assert verdict.outcome == "identical", verdict.reasons


@settings(deadline=None)
@given(deaths, deaths, st.data())
def test_any_one_value_that_differs_is_named(left: dict[int, int], right: dict[int, int], data: st.DataObject) -> None:
    sides = [journal("left", left), journal("right", right)]
    side = data.draw(st.integers(0, 1))
    position = data.draw(
        st.sampled_from([i for i, r in enumerate(sides[side]) if isinstance(r.event, StepDone | StateRestored)])
    )
    event = sides[side][position].event
    if isinstance(event, StateRestored):
        entry, tensor = data.draw(st.sampled_from(STATE)), None
        changed: Event = event.model_copy(update={"entries": event.entries | {entry: "flipped"}})
    else:
        assert isinstance(event, StepDone)
        tables = [(name, tensor) for name, table in event.tensors.items() for tensor in table]
        entry, tensor = data.draw(st.sampled_from([(name, None) for name in CAUSES] + tables))
        if tensor is None:
            changed = altered(event, entry, "flipped")
        else:
            table = event.tensors[entry] | {tensor: "flipped"}
            changed = event.model_copy(update={"tensors": event.tensors | {entry: table}})
    sides[side][position] = sides[side][position]._replace(event=changed)

    verdict = compare(*sides)
    assert verdict.outcome == "different"
    first = verdict.first_difference
    assert first is not None
    assert (first.step, first.entry, first.tensor) == (event.step, entry, tensor)
    assert first.restored == isinstance(event, StateRestored)
    assert compare(*reversed(sides)).outcome == "different"


def test_journals_as_they_are_read_from_disk(tmp_path: Path) -> None:
    """The journal sorts names, so a gradient comes before the loss that it follows from."""
    subject = spoiled(resumed(), 4, "loss")
    for run_dir, records in (("whole", journal("whole")), ("same", resumed()), ("other", subject)):
        for record in records:
            writer = Journal(tmp_path / run_dir, record.writer, record.attempt)
            writer.append(record.event)
            writer.close()
    whole, same, other = (read_journal(tmp_path / run_dir) for run_dir in ("whole", "same", "other"))
    assert compare(whole, same).outcome == "identical"
    assert named(compare(whole, other)) == (4, "loss", None, False)
