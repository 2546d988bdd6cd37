"""What a run's journal adds up to, for `metrics.py`: one record after the other, nothing is read twice."""

from collections.abc import Iterator, Sequence

from chaos.recovery import UsefulTime
from checkpointing.errors import DivergenceError, HarnessError, NonFinite, Preempted, WorkerLost
from checkpointing.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointRejected,
    CheckpointReplicated,
    CheckpointsCoalesced,
    CheckpointsPruned,
    EngineLost,
    EngineServing,
    Evaluated,
    GenerationRejected,
    HangDetected,
    MetricsLogged,
    RankStraggling,
    ReplicationFailed,
    RetentionFailed,
    RunFinished,
    RunStarted,
    RunStopped,
    SaveFailed,
    SaveSkipped,
    StepDone,
)
from checkpointing.journal import Record

LOSS = "policy_loss"

SLOWEST = "timing/slowest_rank_ratio"

TIMINGS = {
    "timing/generate": "generate",
    "timing/fwd_logprobs_values_reward": "forward",
    "timing/train_critic_and_policy": "train",
    "timing/save_checkpoints": "save",
    "timing/sync_weights": "weight sync",
    "timing/eval": "evaluate",
}
"""{what SkyRL's trainer logs: the phase of `checkpointing/progress.py` that it is}."""

CAUSES = {
    "engine": ("ended", "silent"),
    "ranks": ("worker_lost",),
    "driver": ("killed", "hang", "engine", "out_of_memory", "worker_lost", "non_finite", "head_lost", "error"),
    "checkpoint": ("unreadable",),
    "run": ("stopped", "supervisor_lost"),
}
"""{rung, what was replaced: why}. The rungs are those of docs/architecture.md, "A recovery"; `checkpoint`: all ranks
went back to an older one; `run`: somebody started it again."""

_ENDED_WITH = {
    WorkerLost.exit_code: "worker_lost",
    NonFinite.exit_code: "non_finite",
    HarnessError.exit_code: "head_lost",  # any other end with 1 is never followed by an attempt
}

_COUNTED = (
    "steps",
    "saves",
    "save_stopped_seconds",
    "saves_skipped",
    "checkpoints_rejected",
    "divergences",
    "generations_rejected",
    "down_seconds",
    "repeated_steps",
    "repeated_seconds",
    "tokens_generated",
    "tokens_reused",
)

_Key = tuple[str, tuple[str, ...]]


class Values:
    """{(name of the metric, values of its labels): value}."""

    def __init__(self, values: dict[_Key, float] | None = None) -> None:
        self._values = values or {}

    def set(self, name: str, value: float, *labels: str) -> None:
        self._values[name, labels] = value

    def add(self, name: str, value: float, *labels: str) -> None:
        self._values[name, labels] = self._values.get((name, labels), 0.0) + value

    def drop(self, name: str) -> None:
        self._values.pop((name, ()), None)

    def of(self, name: str) -> Iterator[tuple[tuple[str, ...], float]]:
        return ((labels, value) for (found, labels), value in self._values.items() if found == name)

    def copy(self) -> "Values":
        return Values(dict(self._values))


class Tallies:
    """`take` every record in order. `tiers`: names of the run's durable tiers, in order."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self.values, self.useful = Values(), UsefulTime()
        self.committed: dict[int, float] = {}
        """{step: when it was last committed}, in Unix seconds."""
        self.engines_lost: dict[int, int] = {}
        """{engine that does not serve again yet: the attempt that lost it}"""
        self._primary = tiers[0]
        self._waiting: dict[str, dict[str, int]] = {tier: {} for tier in tiers[1:]}
        """{tier: {key of a commit that it waits for: step}}"""
        self._urls: dict[str, int] = {}
        self._best = 0
        self._progressed = False
        self._down_since: float | None = None
        self._hung = self._open = self._fell_back = False
        self._lost: tuple[str, str] | None = None
        """Rung and cause of what the next attempt will be the answer to."""
        self._last = 0.0
        self._begin_at_zero(tiers)

    def _begin_at_zero(self, tiers: Sequence[str]) -> None:
        """What may happen for the first time while Prometheus looks: without a zero before it, that is no increase."""
        for name in _COUNTED:
            self.values.set(f"harness_{name}_total", 0.0)
        for tier in tiers:
            self.values.set("harness_tier_failing", 0.0, tier)
            for name in ("written_bytes", "write_seconds", "freed_bytes", "failures"):
                self.values.set(f"harness_tier_{name}_total", 0.0, tier)
        for rung, causes in CAUSES.items():
            for cause in causes:
                self.values.set("harness_recoveries_total", 0.0, rung, cause)
        self.values.set("harness_attempts_without_progress", 0.0)

    def take(self, record: Record) -> None:
        self.useful.take(record)
        self._take_training(record)
        self._take_checkpoint(record)
        self._take_loss(record)
        self._take_engine(record)
        self._last = record.time
        for tier, waiting in self._waiting.items():
            self.values.set("harness_tier_backlog", len(waiting), tier)

    def _take_training(self, record: Record) -> None:
        match record.event:
            case RunStarted():
                self.values.set("harness_run_start_timestamp_seconds", record.time)
            case AttemptStarted(world_size=ranks):
                self.values.set("harness_ranks", ranks)
            case StepDone() as step:
                self._count_step(step, record.time)
                self._count_tokens(step)
            case Evaluated() as evaluated:
                self._count_tokens(evaluated)
            case MetricsLogged(metrics=metrics):
                for name, phase in TIMINGS.items():
                    if name in metrics:
                        self.values.set("harness_phase_seconds", metrics[name], phase)
                if SLOWEST in metrics:
                    self.values.set("harness_slowest_rank_ratio", metrics[SLOWEST])
            case RankStraggling(role=role, rank=rank):
                self.values.set("harness_straggler_timestamp_seconds", record.time, role, str(rank))

    def _count_step(self, step: StepDone, time: float) -> None:
        self.values.set("harness_step_timestamp_seconds", time)
        self.values.add("harness_steps_total", 1)
        if LOSS in step.scalars:
            self.values.set("harness_loss", float.fromhex(step.scalars[LOSS]))
        if step.step <= self._best:
            self.values.add("harness_repeated_steps_total", 1)
            self.values.add("harness_repeated_seconds_total", step.seconds)
        else:
            self._best, self._progressed = step.step, True
            self.values.set("harness_attempts_without_progress", 0)
        if self._down_since is not None:
            self.values.add("harness_down_seconds_total", time - self._down_since)
            self._down_since = None

    def _count_tokens(self, event: StepDone | Evaluated) -> None:
        self.values.add("harness_tokens_generated_total", event.tokens_generated)
        self.values.add("harness_tokens_reused_total", event.tokens_reused)

    def _take_checkpoint(self, record: Record) -> None:
        match record.event:
            case AttemptStarted(resumed_from=step):
                # What later checkpoints the attempt before it made is not part of the run any more.
                for tier, waiting in self._waiting.items():
                    self._waiting[tier] = {key: at for key, at in waiting.items() if at <= (step or 0)}
            case CheckpointCommitted() as saved:
                self.committed[saved.step] = record.time
                self.values.set("harness_checkpoint_bytes", saved.bytes_total)
                self.values.add("harness_saves_total", 1)
                self.values.add("harness_save_stopped_seconds_total", saved.stopped_seconds)
                self._count_written(self._primary, saved)
                for waiting in self._waiting.values():
                    waiting[saved.commit] = saved.step
            case CheckpointReplicated(tier=tier, step=step) as copied:
                self._count_written(tier, copied)
                # They are carried oldest first: an older one that still waits was let go.
                for key in [key for key, at in self._waiting.get(tier, {}).items() if at <= step]:
                    del self._waiting[tier][key]
            case CheckpointsCoalesced(tier=tier, commits=keys):
                for key in keys:
                    self._waiting.get(tier, {}).pop(key, None)
            case CheckpointsPruned(tier=tier, bytes_freed=freed):
                self.values.add("harness_tier_freed_bytes_total", freed, tier)
            case _:
                self._take_refusal(record)

    def _count_written(self, tier: str, event: CheckpointCommitted | CheckpointReplicated) -> None:
        self.values.set("harness_tier_failing", 0, tier)
        self.values.add("harness_tier_written_bytes_total", event.bytes_new, tier)
        self.values.add("harness_tier_write_seconds_total", event.seconds, tier)

    def _take_refusal(self, record: Record) -> None:
        match record.event:
            case SaveFailed():
                self._refused(self._primary)
            case ReplicationFailed(tier=tier):
                self._refused(tier)
            case RetentionFailed(tier=tier):
                self.values.add("harness_tier_failures_total", 1, tier)
            case SaveSkipped():
                self.values.add("harness_saves_skipped_total", 1)
            case CheckpointRejected(role=role):
                self.values.add("harness_checkpoints_rejected_total", 1)
                self._fell_back |= role is not None  # the driver that found it out becomes the next attempt

    def _refused(self, tier: str) -> None:
        self.values.set("harness_tier_failing", 1, tier)
        self.values.add("harness_tier_failures_total", 1, tier)

    def _take_loss(self, record: Record) -> None:
        match record.event:
            case AttemptStarted():
                self._recovered()
            case HangDetected():
                self._hung = True
            case AttemptEnded() as ended:
                self._open, self._lost = False, None
                if ended.exit_code not in (0, Preempted.exit_code):
                    self._count_failure(ended, record.time)
            case RunStopped(exit_code=code):
                # Whoever starts it again knows what happened; until then it is not down, it is stopped.
                self._lost, self._down_since = ("run", "stopped"), None
                self.values.set("harness_exit_code", code)
                self.values.set("harness_attempts_without_progress", 0)
            case RunFinished():
                self._open = False

    def _recovered(self) -> None:
        if self._open:  # the attempt before it has no end: nobody was there to say so
            self._lost = ("checkpoint", "unreadable") if self._fell_back else ("run", "supervisor_lost")
            self._down_since = self._last if self._down_since is None else self._down_since
        if self._lost is not None:
            self.values.add("harness_recoveries_total", 1, *self._lost)
        self._lost, self._open, self._hung, self._fell_back = None, True, False, False
        self.values.drop("harness_exit_code")

    def _count_failure(self, ended: AttemptEnded, time: float) -> None:
        rung = "ranks" if ended.in_place else "driver"
        self._lost = (rung, self._cause(ended))
        self._down_since = time if self._down_since is None else self._down_since
        if not self._progressed:
            self.values.add("harness_attempts_without_progress", 1)
        self._progressed = False
        if ended.exit_code == DivergenceError.exit_code:
            self.values.add("harness_divergences_total", 1)

    def _cause(self, ended: AttemptEnded) -> str:
        if self._hung:
            return "hang"
        if ended.engine is not None:
            return "engine"
        if ended.oom_kills:
            return "out_of_memory"
        if ended.signal is not None:
            return "killed"
        return _ENDED_WITH.get(ended.exit_code or 0, "error")

    def _take_engine(self, record: Record) -> None:
        match record.event:
            case StepDone():  # an attempt takes no step before all of them serve
                self.engines_lost = {one: at for one, at in self.engines_lost.items() if at == record.attempt}
            case EngineLost(engine=engine, url=url, exit_code=code):
                self.engines_lost[engine] = record.attempt
                self._urls[url] = engine
                self.values.add("harness_recoveries_total", 1, "engine", "silent" if code is None else "ended")
            case EngineServing(url=url):
                self.engines_lost.pop(self._urls.get(url, -1), None)
            case GenerationRejected():
                self.values.add("harness_generations_rejected_total", 1)
