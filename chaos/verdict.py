"""Are two runs the same, bit for bit? A pure function of their journals, that says "can't tell" rather than guess.

different     two records of the same thing differ, or a run that ended lacks a step that the other one has
inconclusive  nothing differs, but that proves nothing: see `_doubts`; and always where a run meets itself
identical     every record of every step is equal, and the comparison was able to fail

Every record of a step in one run, repetitions after a resume included, must equal every record of that step in the
other; so a run whose repetitions disagree can't be identical to anything. What a restore brought back must equal what
the other run held at the end of that step. Both runs are treated alike: exchanging them does not change the outcome.
A different number of planned steps needs no rule of its own: of two runs that ended, the shorter one lacks steps.

After a run went on with other numbers of ranks (`topology.changed`), sums are taken in another order and ranks draw
from other streams: of its steps since then only what does not depend on that is compared (`_ANY_TOPOLOGY`), unless the
other run changed alike. That leaves the rest unproved, so the verdict is inconclusive at best, and says so.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, computed_field

from checkpointing.errors import VERIFY_CANNOT_TELL, VERIFY_DIFFERENT
from checkpointing.events import (
    FaultWitnessed,
    RunFinished,
    RunStarted,
    StateRestored,
    StepDone,
    TopologyChanged,
)
from checkpointing.journal import Record

_DATA = ("prompts", "tokens", "logprobs", "rewards", "advantages")
"""Each is computed from those before it, so the first that differs is the cause."""
_WHOLE_STEP = "step"
_ANY_TOPOLOGY = frozenset({"epoch", "prompts", "driver/data_position", "driver/global_step"})
"""What a step is the same in, whatever the number of ranks: which data it saw."""


class Comparison(BaseModel):
    """One value of a step in both runs; None: that run has none. `attempt` is the subject's.

    The entry `step` stands for a whole step, its values for whether it was done.
    """

    model_config = ConfigDict(frozen=True)

    step: int
    entry: str
    tensor: str | None = None
    restored: bool = False
    """The state that a restore of this step brought back, not the step itself."""
    baseline_value: str | None
    subject_value: str | None
    baseline_attempt: int | None = None
    attempt: int | None = None

    @property
    def differs(self) -> bool:
        return self.baseline_value != self.subject_value

    def __str__(self) -> str:
        if self.entry == _WHOLE_STEP:
            return f"step {self.step} is missing in the {'subject' if self.subject_value is None else 'baseline'}"
        place = f"step {self.step}{' as restored' if self.restored else ''}: {self.entry}"
        tensor = f", tensor {self.tensor}" if self.tensor else ""
        left = f"baseline (attempt {self.baseline_attempt}) {self.baseline_value or 'has none'}"
        right = f"subject (attempt {self.attempt}) {self.subject_value or 'has none'}"
        return f"{place}{tensor}: {left}, {right}"


class Verdict(BaseModel):
    """`entries_compared` counts pairs of values; `first_difference` is the cause: lowest step, in it inputs first."""

    model_config = ConfigDict(frozen=True)

    outcome: Literal["identical", "different", "inconclusive"]
    reasons: tuple[str, ...] = ()
    doubts: tuple[tuple[str, str], ...] = ()
    """(name, text) of why equal records would prove nothing; the texts are among the reasons."""
    steps_compared: int = 0
    entries_compared: int = 0
    first_difference: Comparison | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def exit_code(self) -> int:
        return {"identical": 0, "different": VERIFY_DIFFERENT, "inconclusive": VERIFY_CANNOT_TELL}[self.outcome]


def compare(baseline: Sequence[Record], subject: Sequence[Record]) -> Verdict:
    """Compare two runs by their journals, given in the order they were written."""
    base, subj = _Run("baseline", baseline), _Run("subject", subject)
    if base.start and subj.start and base.start.run_id == subj.start.run_id:
        itself = f"run {base.start.run_id} was compared with itself"
        return Verdict(outcome="inconclusive", reasons=(itself,), doubts=(("itself", itself),))

    compared = list(_comparisons(base, subj))
    differences = [comparison for comparison in compared if comparison.differs]
    common = base.done & subj.done
    doubts = tuple(_doubts(base, subj, common))
    texts = tuple(text for _, text in doubts)
    first = differences[0] if differences else None
    count = (f"{len(differences)} of {len(compared)} values differ",) if differences else ()
    return Verdict(
        outcome="different" if differences else "inconclusive" if doubts else "identical",
        reasons=((str(first),) if first else ()) + count + texts,
        doubts=doubts,
        steps_compared=len(common),
        entries_compared=len(compared),
        first_difference=first,
    )


def comparisons(baseline: Sequence[Record], subject: Sequence[Record]) -> list[Comparison]:
    """Every pair of values that `compare` looks at, in its order: by step, causes first."""
    return list(_comparisons(_Run("baseline", baseline), _Run("subject", subject)))


@dataclass(frozen=True)
class _Seen:
    """One record of a step: the step itself, or the state that a restore of it brought back."""

    attempt: int
    restored: bool
    inputs: tuple[dict[str, str], ...]
    """What led to the state, causes first; empty for a restore."""
    state: dict[str, str]
    tensors: dict[str, dict[str, str]]
    topologies: tuple[TopologyChanged, ...]
    """The changes that the run had been through by then."""

    @classmethod
    def of(cls, attempt: int, event: StepDone | StateRestored, topologies: Sequence[TopologyChanged]) -> "_Seen":
        changes = tuple(topologies)
        if isinstance(event, StateRestored):
            return cls(attempt, True, (), event.entries, {}, changes)
        data = {name: event.data[name] for name in _DATA if name in event.data} | event.data
        scalars = {name: event.scalars[name] for name in sorted(event.scalars, key=_is_gradient)}
        return cls(attempt, False, ({"epoch": str(event.epoch)}, data, scalars), event.state, event.tensors, changes)


class _Run:
    """One journal, sorted by what is compared."""

    def __init__(self, name: str, records: Sequence[Record]) -> None:
        self.name = name
        self.start: RunStarted | None = None
        self.ended = False
        self.seen: dict[int, list[_Seen]] = {}
        self.done: set[int] = set()
        self.zero_advantages: dict[int, bool] = {}
        self.witnessed: set[int] = set()
        self.topologies: list[TopologyChanged] = []
        for record in records:
            match record.event:
                case RunStarted() as event:
                    self.start = self.start or event
                case StepDone() as event:
                    self.done.add(event.step)
                    self.seen.setdefault(event.step, []).append(_Seen.of(record.attempt, event, self.topologies))
                    self.zero_advantages[event.step] = event.zero_advantages
                case StateRestored() as event:
                    self.seen.setdefault(event.step, []).append(_Seen.of(record.attempt, event, self.topologies))
                case TopologyChanged() as event:
                    self.topologies.append(event)
                case FaultWitnessed() as event:
                    self.witnessed.add(event.index)
                case RunFinished():
                    self.ended = True

    def changes_of_topology(self) -> Iterator[str]:
        for change in self.topologies:
            yield (
                f"topology changed: the {self.name} went on from step {change.step} with {change.after} instead of "
                f"{change.before}; up to there everything was compared, after it {', '.join(sorted(_ANY_TOPOLOGY))}"
            )

    @property
    def last_step(self) -> int:
        return max(self.done, default=0)

    def lacks(self, step: int) -> bool:
        """Not done and never to come: later ones were, or the run says that it has ended, or it did all it planned."""
        if step in self.done:
            return False
        did_all = self.start is not None and self.last_step >= self.start.planned_steps
        return self.ended or did_all or step < self.last_step


def _is_gradient(scalar: str) -> bool:
    """Gradients follow from the losses, though the journal's alphabet puts them first."""
    return "grad" in scalar


def _comparisons(base: _Run, subj: _Run) -> Iterator[Comparison]:
    for step in sorted(base.done | subj.done):
        yield from _compare_step(step, base, subj)


def _compare_step(step: int, base: _Run, subj: _Run) -> Iterator[Comparison]:
    """Every pair of records of one step, in the order of the journals: it is done before it can be restored."""
    if base.lacks(step):
        yield Comparison(step=step, entry=_WHOLE_STEP, baseline_value=None, subject_value="done")
    if subj.lacks(step):
        yield Comparison(step=step, entry=_WHOLE_STEP, baseline_value="done", subject_value=None)
    for left, right in itertools.product(base.seen.get(step, ()), subj.seen.get(step, ())):
        yield from _compare_seen(step, left, right)


def _compare_seen(step: int, left: _Seen, right: _Seen) -> Iterator[Comparison]:
    restored = left.restored or right.restored

    def pair(entry: str, values: tuple[str | None, str | None], tensor: str | None = None) -> Comparison:
        return Comparison(
            step=step,
            entry=entry,
            tensor=tensor,
            restored=restored,
            baseline_value=values[0],
            subject_value=values[1],
            baseline_attempt=left.attempt,
            attempt=right.attempt,
        )

    def comparable(*values: dict[str, str]) -> list[str]:
        entries = list(values[0] | values[1])
        return entries if left.topologies == right.topologies else [e for e in entries if e in _ANY_TOPOLOGY]

    for ours, theirs in zip(left.inputs, right.inputs, strict=False):  # a restore has none
        for entry in comparable(ours, theirs):
            yield pair(entry, (ours.get(entry), theirs.get(entry)))
    for entry in comparable(left.state, right.state):
        tensor = _first_tensor(left.tensors.get(entry), right.tensors.get(entry))
        if tensor is None:
            yield pair(entry, (left.state.get(entry), right.state.get(entry)))
        else:
            yield pair(entry, (left.tensors[entry].get(tensor), right.tensors[entry].get(tensor)), tensor)


def _first_tensor(left: dict[str, str] | None, right: dict[str, str] | None) -> str | None:
    """The first tensor that differs, None where none does or a run kept no table."""
    if left is None or right is None:
        return None
    return next((tensor for tensor in left | right if left.get(tensor) != right.get(tensor)), None)


def _doubts(base: _Run, subj: _Run, common: set[int]) -> Iterator[tuple[str, str]]:
    """(name, text) of why equal records would prove nothing."""
    if not common:
        yield "nothing compared", "no step is in both runs: nothing was compared"
    if base.topologies != subj.topologies:
        for text in (*base.changes_of_topology(), *subj.changes_of_topology()):
            yield "topology changed", text
    for run in (base, subj):
        if run.start is None:
            yield "no start", f"the {run.name} has no run.started event: what was planned is unknown"
            continue
        if run.last_step != run.start.planned_steps:
            yield "not done", f"the {run.name} planned {run.start.planned_steps} steps, ran {run.last_step}"
        if run.start.faults_planned > len(run.witnessed):
            seen = f"{len(run.witnessed)} were witnessed"
            yield "not witnessed", f"the {run.name} planned {run.start.faults_planned} faults, {seen}"
        if common and all(run.zero_advantages[step] for step in common):
            yield "nothing learned", f"all advantages of the {run.name} are zero: there was nothing to learn"
        if common and not _parameters_moved(run, common):
            yield "nothing moved", f"no parameter of the {run.name} moved"


def _parameters_moved(run: _Run, steps: set[int]) -> bool:
    values: dict[str, set[str]] = {}
    for step in steps:
        for seen in run.seen[step]:
            for entry, digest in seen.state.items():
                if entry.endswith("/parameters"):
                    values.setdefault(entry, set()).add(digest)
    return any(len(digests) > 1 for digests in values.values())
