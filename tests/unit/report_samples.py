"""A drill as its report is given it: two ranks, one killed in step 3, a hang in step 4, everything traced."""

from chaos.report import Drill, Repeat
from chaos.verdict import compare
from checkpointing.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
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

STEPS = 5
DATA = ("prompts", "tokens", "logprobs", "rewards", "advantages")
STATE = ("driver/rng", "policy/optimizer", "policy/parameters", "policy/rng")
RANK_DEAD = "error: policy rank 1 (pid 12) died at step 3"


def digest(*what: object) -> str:
    return "".join(f"{ord(letter) % 16:x}" for letter in ("/".join(map(str, what)) * 64)[:64])


def pid(process: str, attempt: int) -> int:
    return 1000 * attempt + sum(map(ord, process))


class SampleRun:
    """Builds a journal and a trace; `now` is in Unix seconds."""

    def __init__(self, run_id: str, faults: int = 0) -> None:
        self.now, self.attempt = 1_800_000_000.0, 0
        self.records: list[Record] = []
        self.trace: list[Mark] = []
        self._say(RunStarted(run_id=run_id, config_digest="c", planned_steps=STEPS, faults_planned=faults), attempt=1)

    def start(self, resumed_from: int | None = None) -> "SampleRun":
        self.attempt += 1
        self.reach("driver", "driver.started", 0)
        self._say(AttemptStarted(pid=10, resumed_from=resumed_from, world_size=2), after=2)
        for rank in range(2):
            self.reach(f"policy:{rank}", "worker.started", 0, after=8)
        self.reach("keeper:0", "worker.started", 0)
        if resumed_from is not None:
            self.reach("driver", "restore.begin", resumed_from)
            self.reach("policy:0", "restore.rank", 0)
            self.reach("policy:1", "restore.rank", 0)
            entries = {entry: digest(entry, resumed_from) for entry in STATE}
            self._say(StateRestored(step=resumed_from, entries=entries, seconds=1.5), after=1.5)
            self.reach("driver", "restore.end", resumed_from)
        return self

    def begin_step(self, step: int) -> None:
        for phase, seconds in (("generate", 1.0), ("reward", 3.0), ("forward", 0.2), ("train", 1.0)):
            self.reach("driver", f"{phase}.begin", step, after=seconds)
        for phase in ("train.forward_backward", "train.optimizer"):
            self.reach("policy:0", phase, step, after=0.8)
            self.reach("policy:1", phase, step, after=0.1)

    def steps(self, first: int, last: int, reused: int = 0) -> "SampleRun":
        for step in range(first, last + 1):
            self.begin_step(step)
            self.reach("driver", "step.trained", step, after=0.6)
            kept = reused if step == first else 0
            self._say(_done(step).model_copy(update={"tokens_generated": 100 - kept, "tokens_reused": kept}))
            self.reach("driver", "save.begin", step)
            self.reach("driver", "save.write", step, after=0.1)
            self.reach("keeper:0", "save.shard_written", step, after=0.1)
            self.reach("driver", "save.committed", step, after=0.2)
            commit = f"commits/{step:010d}-{self.attempt:06d}.json"
            self._say(CheckpointCommitted(step=step, commit=commit, bytes_total=10, seconds=0.4))
            self.reach("driver", "weight_sync.begin", step)
            self.reach("driver", "weight_sync.end", step, after=0.3)
        return self

    def die(self, ended: AttemptEnded, fault: FaultWitnessed, hang: HangDetected | None = None) -> "SampleRun":
        if hang:
            self._say(hang, writer="supervisor", after=hang.seconds)
        self._say(ended, writer="supervisor", after=1)
        self._say(fault, writer="supervisor")
        self.now += 3
        return self

    def finish(self) -> "SampleRun":
        self._say(RunFinished(planned_steps=STEPS, last_step=STEPS))
        self._say(AttemptEnded(exit_code=0, signal=None, reason="complete"), writer="supervisor", after=1)
        return self

    def reach(self, process: str, phase: str, step: int, after: float = 0.05) -> None:
        self.now += after
        self.trace.append(Mark(time=self.now, process=process, pid=pid(process, self.attempt), phase=phase, step=step))

    def _say(self, event: Event, writer: str = "driver", after: float = 0.05, attempt: int = 0) -> None:
        self.now += after
        self.records.append(Record(len(self.records), self.now, attempt or self.attempt, writer, event))


def _done(step: int) -> StepDone:
    return StepDone(
        step=step,
        epoch=0,
        seconds=7.5,
        digest_seconds=0.3,
        state={entry: digest(entry, step) for entry in STATE},
        tensors={"policy/optimizer": {"lora_a": digest("a", step), "lora_b": digest("b", step)}},
        data={entry: digest(entry, step) for entry in DATA},
        scalars={"final_loss": (0.5 / step).hex(), "reward/avg_raw_reward": (step / 7).hex()},
        zero_advantages=False,
    )


def baseline() -> SampleRun:
    return SampleRun("baseline").start().steps(1, STEPS).finish()


def killed_and_hung() -> SampleRun:
    run = SampleRun("subject", faults=2).start().steps(1, 2)
    run.begin_step(3)
    run.die(AttemptEnded(exit_code=17, signal=None, reason=RANK_DEAD), _fault(0, "kill", "policy:1", 3))
    run.start(2).steps(3, 3, reused=100)
    run.begin_step(4)
    hang = HangDetected(phase="train", step=4, seconds=20.0, limit=15.0, last_lines=[])
    killed = AttemptEnded(exit_code=None, signal=9, reason=f"hang: {hang.phase}")
    run.die(killed, _fault(1, "stop", "policy:0", 4), hang)
    return run.start(3).steps(4, STEPS, reused=100).finish()


def _fault(index: int, fault: str, target: str, step: int) -> FaultWitnessed:
    return FaultWitnessed(
        index=index,
        fault=fault,
        target=target,
        phase="train.optimizer",
        step=step,
        pid=pid(target, index + 1),
        evidence="pid 12 has gone",
    )


def spoiled(records: list[Record], step: int, entry: str) -> list[Record]:
    """Another digest of `entry`, and of the first tensor in it, in every record of `step`."""

    def spoil(event: Event) -> Event:
        if not isinstance(event, StepDone) or event.step != step:
            return event
        tables = {name: table | {next(iter(table)): "f" * 64} for name, table in event.tensors.items() if name == entry}
        return event.model_copy(update={"state": event.state | {entry: "f" * 64}, "tensors": event.tensors | tables})

    return [record._replace(event=spoil(record.event)) for record in records]


def drill(subject: list[Record] | None = None, **changed: object) -> Drill:
    run, base = killed_and_hung(), baseline().records
    records = run.records if subject is None else subject
    verdict = compare(base, records)
    outcome = {"identical": "passed", "different": "failed", "inconclusive": "inconclusive"}[verdict.outcome]
    fields: dict[str, object] = {
        "title": "kill a rank, stop a rank",
        "outcome": outcome,
        "reasons": verdict.reasons,
        "baseline": base,
        "subject": records,
        "repeat": Repeat(command="harness drill sample.yaml --seed 42", seed=42, versions={"torch": "2.13.0"}),
        "trace": run.trace,
    }
    return Drill(**(fields | changed))  # type: ignore[arg-type]
