"""Did the run survive the drill? A pure function of three journals, the plan, and what was expected.

failed        something is wrong that no doubt explains: a step, an entry or a tensor differs although the two
              baselines agree; a step was skipped or trained twice; a restore brought back another step or other bytes
              than it says; a limit is exceeded. Exit code 20
inconclusive  nothing is wrong, but that proves nothing: the baselines differ, a fault was not witnessed, nothing moved,
              nothing was compared, the run did not have to recover, a run met itself. Exit code 21
passed        nothing is wrong, and it would have been seen. Exit code 0

Every reason has a name that does not change, so that a drill that is to fail can be held to the right one.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, computed_field

from chaos.drill import Expectations
from chaos.plan import FaultPlan, PlannedFault
from chaos.recovery import Recovery, recoveries
from chaos.verdict import Comparison, Verdict, compare
from checkpointing.errors import VERIFY_CANNOT_TELL, VERIFY_DIFFERENT
from checkpointing.events import (
    AttemptEnded,
    AttemptStarted,
    EngineLost,
    FaultWitnessed,
    RunFinished,
    RunStarted,
    RunStopped,
    StateRestored,
    StepDone,
    TopologyChanged,
)
from checkpointing.journal import Record

_DEADLY = ("kill", "kill_node", "kill_head", "memory_limit")
_MISSED = ("driver", "policy", "critic", "ref", "engine")
"""Without which a run does not go on: their loss must show."""
_MIN_STEPS = 2
"""One step alone can't show that anything moved."""

Records = Sequence[Record]


class Reason(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


class Judgement(BaseModel):
    """`failures` and `doubts` are all there are; of the baselines only doubts can come."""

    model_config = ConfigDict(frozen=True)

    outcome: Literal["passed", "failed", "inconclusive"]
    failures: tuple[Reason, ...] = ()
    doubts: tuple[Reason, ...] = ()
    steps_compared: int = 0
    entries_compared: int = 0
    first_difference: Comparison | None = None
    recoveries: tuple[Recovery, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def exit_code(self) -> int:
        return {"passed": 0, "failed": VERIFY_DIFFERENT, "inconclusive": VERIFY_CANNOT_TELL}[self.outcome]

    @property
    def reasons(self) -> tuple[Reason, ...]:
        return self.failures + self.doubts


def judge(baseline: Records, again: Records, faulted: Records, plan: FaultPlan, expect: Expectations) -> Judgement:
    """Hold a run with faults against two without.

    Args:
        baseline, again: the journals of the same run, left alone twice.
        faulted: the journal of the run that met `plan`.
        plan: the faults that were planned.
        expect: what makes the drill pass.
    """
    cut = _last_step(faulted) if expect.exit_code != 0 else None
    noise, verdict = compare(baseline, again), compare(_up_to(baseline, cut), _up_to(faulted, cut))
    doubts = [*_doubts_of_baselines(noise, baseline, again), *_doubts(verdict, faulted, expect)]
    doubts += _doubts_of_faults(faulted, plan, expect)
    certain = noise.outcome != "different"
    failures = [*_differences(verdict, certain), *_defects(faulted), *_exceeded(faulted, expect)]
    if verdict.outcome == "different" and not certain:
        doubts.append(Reason(name="baselines differ", text=f"so it proves nothing that {verdict.reasons[0]}"))
    return Judgement(
        outcome="failed" if failures else "inconclusive" if doubts else "passed",
        failures=tuple(failures),
        doubts=tuple(doubts),
        steps_compared=verdict.steps_compared,
        entries_compared=verdict.entries_compared,
        first_difference=verdict.first_difference,
        recoveries=tuple(recoveries(faulted)),
    )


def _doubts_of_baselines(noise: Verdict, *baselines: Records) -> Iterator[Reason]:
    if noise.outcome == "different":
        yield Reason(name="baselines differ", text=noise.reasons[0])
    for name, text in noise.doubts:
        yield Reason(name=name, text=f"the two baselines: {text}")
    for which, records in zip(("first", "second"), baselines, strict=True):
        if _events(records, FaultWitnessed) or _losses(records):
            yield Reason(name="baseline disturbed", text=f"the {which} baseline was not left alone")


def _doubts(verdict: Verdict, faulted: Records, expect: Expectations) -> Iterator[Reason]:
    changed = bool(_events(faulted, TopologyChanged))
    for name, text in verdict.doubts:
        # Which faults were not witnessed is said below; a change that was expected is what was to be shown.
        if name != "not witnessed" and not (name == "topology changed" and expect.verdict == name):
            yield Reason(name=name, text=text)
    if expect.verdict == "topology changed" and not changed:
        yield Reason(name="topology unchanged", text="the run went on with the same numbers of ranks")
    if 0 < verdict.steps_compared < _MIN_STEPS:
        yield Reason(name="too few steps", text=f"{verdict.steps_compared} step was compared")
    if verdict.steps_compared and not any(event.state for _, event in _events(faulted, StepDone)):
        yield Reason(name="nothing compared", text="the steps hold no digests of the State")


def _doubts_of_faults(faulted: Records, plan: FaultPlan, expect: Expectations) -> Iterator[Reason]:
    if not plan.faults:
        yield Reason(name="not witnessed", text="no fault was planned")
    witnessed = {event.index: (event.fault, event.target) for _, event in _events(faulted, FaultWitnessed)}
    for index, planned in enumerate(plan.faults):
        if witnessed.get(index) != (planned.fault, planned.target):
            yield Reason(name="not witnessed", text=f"fault {index} ({planned}) was not seen to happen")
    losses, wanted = len(_losses(faulted)), _recoveries_wanted(plan.faults, expect)
    if losses < wanted:
        text = f"{losses} attempts ended or engines were lost, {wanted} at least should have been"
        yield Reason(name="no recovery", text=text)
    if expect.exit_code == 0 and witnessed and not _went_on(faulted):
        yield Reason(name="nothing after", text="no step was done after the last fault: nothing had to be recovered")


def _recoveries_wanted(faults: Sequence[PlannedFault], expect: Expectations) -> int:
    if expect.recoveries is not None:
        return expect.recoveries
    return int(any(f.fault in _DEADLY and f.target.partition(":")[0] in _MISSED for f in faults))


def _went_on(faulted: Records) -> bool:
    """Whether a step was done after the last fault: by a later attempt, or a later step."""
    attempt, step = max((record.attempt, event.step) for record, event in _events(faulted, FaultWitnessed))
    return any(record.attempt > attempt or event.step > step for record, event in _events(faulted, StepDone))


def _differences(verdict: Verdict, certain: bool) -> Iterator[Reason]:
    if verdict.outcome == "different" and certain:
        yield Reason(name="diverged", text=verdict.reasons[0])


def _defects(faulted: Records) -> Iterator[Reason]:
    """What contradicts itself within one journal, whatever any baseline says."""
    saved: dict[int, dict[str, str]] = {}
    topologies = {event.step for _, event in _events(faulted, TopologyChanged)}
    resumed: dict[int, int] = {}
    last: dict[int, int] = {}
    restored_by = {record.attempt for record, _ in _events(faulted, StateRestored)}
    for record in faulted:
        attempt = record.attempt
        match record.event:
            case AttemptStarted() as started:
                if attempt in resumed:
                    text = f"attempt {attempt} began twice: storage had lost the first one, and fences neither"
                    yield Reason(name="same attempt", text=text)
                resumed[attempt] = last[attempt] = started.resumed_from or 0
            case StateRestored() as restored:
                yield from _restored_rightly(attempt, restored, resumed.get(attempt), saved, topologies)
            case StepDone() as done:
                yield from _in_order(attempt, done.step, last.get(attempt))
                if resumed.get(attempt) and attempt not in restored_by:
                    restored_by.add(attempt)
                    text = f"attempt {attempt} says that it resumed from step {resumed[attempt]}, and restored nothing"
                    yield Reason(name="not restored", text=text)
                last[attempt] = done.step
                saved[done.step] = done.state


def _in_order(attempt: int, step: int, before: int | None) -> Iterator[Reason]:
    if before is None:
        yield Reason(name="no attempt", text=f"step {step} was done by attempt {attempt}, which never began")
    elif step <= before:
        yield Reason(name="trained twice", text=f"attempt {attempt} did step {step} when it had done step {before}")
    elif step > before + 1:
        yield Reason(name="step skipped", text=f"attempt {attempt} did step {step} right after step {before}")


def _restored_rightly(
    attempt: int,
    restored: StateRestored,
    resumed_from: int | None,
    saved: dict[int, dict[str, str]],
    topologies: set[int],
) -> Iterator[Reason]:
    if restored.step != resumed_from:
        text = f"attempt {attempt} says that it resumed from step {resumed_from}, and restored step {restored.step}"
        yield Reason(name="restored another step", text=text)
    before = saved.get(restored.step)
    if before is None or restored.step in topologies:
        return
    for entry in sorted(before.keys() | restored.entries.keys()):
        was, held = before.get(entry), restored.entries.get(entry)
        if was != held:
            text = f"attempt {attempt}, step {restored.step}: {entry} was {was}, is {held or 'not there'}"
            yield Reason(name="restored wrongly", text=text)


def _exceeded(faulted: Records, expect: Expectations) -> Iterator[Reason]:
    code = _exit_code(faulted)
    if code != expect.exit_code:
        yield Reason(name="exit code", text=f"the run ended with {code}, {expect.exit_code} expected")
    for one in recoveries(faulted):
        if one.seconds_down is None:
            if expect.exit_code == 0 and code != 0:  # the steps may all have been done by then
                yield Reason(name="not recovered", text=f"no step was done after attempt {one.attempt} ended")
        elif expect.seconds_down is not None and one.seconds_down > expect.seconds_down:
            text = f"{one.seconds_down:.1f} s after attempt {one.attempt}, {expect.seconds_down:.1f} s allowed"
            yield Reason(name="seconds down", text=text)
        if expect.steps_repeated is not None and one.steps_repeated > expect.steps_repeated:
            text = f"{one.steps_repeated} after attempt {one.attempt}, {expect.steps_repeated} allowed"
            yield Reason(name="steps repeated", text=text)


def _exit_code(faulted: Records) -> int | None:
    """None: it has neither finished nor been stopped."""
    code = None
    for record in faulted:
        match record.event:
            case RunFinished():
                code = 0
            case RunStopped() as stopped:
                code = stopped.exit_code
    return code


def _last_step(records: Records) -> int:
    return max((event.step for _, event in _events(records, StepDone)), default=0)


def _up_to(records: Records, last: int | None) -> list[Record]:
    """A run as if only `last` steps had been planned and done; all of it for None."""
    if last is None:
        return list(records)
    kept = []
    for record in records:
        match record.event:
            case RunStarted() as start:
                kept.append(record._replace(event=start.model_copy(update={"planned_steps": last})))
            case StepDone() | StateRestored() as event if event.step > last:
                continue
            case _:
                kept.append(record)
    return kept


def _losses(records: Records) -> list[AttemptEnded | EngineLost]:
    """Attempts that did not end well, and engines that were started again while one went on."""
    ends = [event for _, event in _events(records, AttemptEnded) if event.exit_code != 0]
    return [*ends, *(event for _, event in _events(records, EngineLost))]


def _events[E](records: Records, kind: type[E]) -> list[tuple[Record, E]]:
    return [(record, record.event) for record in records if isinstance(record.event, kind)]
