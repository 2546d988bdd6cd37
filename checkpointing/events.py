"""The journal's vocabulary: one class per event, its fields are what later readers may rely on.

Digests are lower-case hex. Floats that must compare bit for bit are written by `float.hex()`. JSON has no word for a
float that is not finite: it is written as the string "NaN", "Infinity" or "-Infinity" and read back as what it was.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from checkpointing.redaction import redacted

Words = Annotated[str, AfterValidator(redacted)]
"""What somebody said, without the secrets in it."""


class _Event(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class RunStarted(_Event):
    """Written once by the supervisor, or by the driver where there is none."""

    event: Literal["run.started"] = "run.started"
    run_id: str
    config_digest: str
    planned_steps: int
    faults_planned: int = 0


class AttemptStarted(_Event):
    """A driver begins. `resumed_from` is the step of the commit it restores, None for a fresh start."""

    event: Literal["attempt.started"] = "attempt.started"
    pid: int
    resumed_from: int | None
    world_size: int


class RanksBuilt(_Event):
    """An attempt has made its ranks. What they say they run on: {Ray's id of a node: version}, None without a GPU."""

    event: Literal["ranks.built"] = "ranks.built"
    nvidia_driver: dict[str, str | None]
    nccl: dict[str, str | None]


class StateRestored(_Event):
    """What the State holds after a restore, recaptured: {entry: digest}. Must equal the commit's digests."""

    event: Literal["state.restored"] = "state.restored"
    step: int
    entries: dict[str, str]
    seconds: float


class StepDone(_Event):
    """One GRPO step, after the optimizer and before the save.

    state     {State entry: digest over all ranks}
    tensors   {State entry: {tensor name: digest over all ranks}}, to name the first tensor that differs;
              left out where it would be larger than `MAX_TENSOR_TABLE` and no checkpoint is due
    data      {prompts|tokens|logprobs|rewards|advantages: digest}
    scalars   {loss|grad_norm|reward|...: float.hex()}
    tokens_*  sampled by engines in this attempt, and taken over from earlier ones; not a property of the step
    """

    event: Literal["step.done"] = "step.done"
    step: int
    epoch: int
    seconds: float
    digest_seconds: float
    state: dict[str, str]
    tensors: dict[str, dict[str, str]] = Field(default_factory=dict)
    data: dict[str, str]
    scalars: dict[str, str]
    zero_advantages: bool
    tokens_generated: int = 0
    tokens_reused: int = 0


class CheckpointCommitted(_Event):
    """The commit exists on the primary tier. `stopped_seconds`: training stood still; `seconds`: until the commit.

    bytes_total  of all blobs it names
    bytes_new    of those that the commit before it does not name
    """

    event: Literal["checkpoint.committed"] = "checkpoint.committed"
    step: int
    commit: str
    bytes_total: int
    bytes_new: int = 0
    stopped_seconds: float = 0.0
    seconds: float


class CheckpointRejected(_Event):
    """A commit that ranks above the one resumed from could not be. Who found out, where that is known."""

    event: Literal["checkpoint.rejected"] = "checkpoint.rejected"
    step: int
    commit: str
    reason: Words
    role: str | None = None
    rank: int | None = None


class SaveFailed(_Event):
    """A save did not become a commit, and is tried again. `failures`: in a row."""

    event: Literal["save.failed"] = "save.failed"
    step: int
    failures: int
    reason: Words


class SaveSkipped(_Event):
    """A save was due while the one before it was still being written, and the config says not to wait."""

    event: Literal["save.skipped"] = "save.skipped"
    step: int
    in_flight: int


class TopologyChanged(_Event):
    """The run goes on with other numbers of ranks. Afterwards sums are taken in another order."""

    event: Literal["topology.changed"] = "topology.changed"
    step: int
    before: dict[str, int]
    after: dict[str, int]


class CheckpointReplicated(_Event):
    """The commit exists on `tier` too, which is not the primary. `bytes_new`: moved for it."""

    event: Literal["checkpoint.replicated"] = "checkpoint.replicated"
    step: int
    commit: str
    tier: str
    bytes_new: int
    seconds: float


class ReplicationFailed(_Event):
    """A tier refused; it is tried again for ever. Said once per outage, with how far the tier is behind."""

    event: Literal["replication.failed"] = "replication.failed"
    tier: str
    reason: Words
    newest_local: int
    newest_there: int | None


class CheckpointsCoalesced(_Event):
    """Commits that will not be carried to `tier`: newer ones wait, and the backlog is bounded."""

    event: Literal["checkpoints.coalesced"] = "checkpoints.coalesced"
    tier: str
    commits: list[str]


class CheckpointsPruned(_Event):
    """Retention deleted commits on `tier`, and bytes that no commit needed any more."""

    event: Literal["checkpoints.pruned"] = "checkpoints.pruned"
    tier: str
    commits: list[str]
    bytes_freed: int


class RetentionFailed(_Event):
    """A tier refused a delete. What was to go goes after a later checkpoint."""

    event: Literal["retention.failed"] = "retention.failed"
    tier: str
    reason: Words


class Evaluated(_Event):
    """`step` 0 is the base model, before any training. Metrics are plain floats as the trainer logs them."""

    event: Literal["evaluated"] = "evaluated"
    step: int
    metrics: dict[str, float]
    tokens_generated: int = 0
    tokens_reused: int = 0


class MetricsLogged(_Event):
    """For the user's metrics logger, journaled before it is told. Several of a step add up; the last value of a metric
    in an attempt counts, and of attempts that ran the step the first."""

    event: Literal["metrics.logged"] = "metrics.logged"
    step: int
    metrics: dict[str, float]


class GenerationRejected(_Event):
    """What an engine answered could not be an answer, and nobody has seen it. It is asked again unless `given_up`.

    session  whose request it was: `<prompt uid>_<repetition>`
    """

    event: Literal["generation.rejected"] = "generation.rejected"
    step: int
    session: str
    reason: Words
    given_up: bool


class FaultWitnessed(_Event):
    """A planned fault was seen to have happened. `pid`: of the process that it aimed at; None where it was none."""

    event: Literal["fault.witnessed"] = "fault.witnessed"
    index: int
    fault: str
    target: str
    phase: str
    step: int
    pid: int | None
    evidence: Words


class HangDetected(_Event):
    """Written by the supervisor, which then ends the attempt: nothing was heard for `seconds` since `phase` began or
    last went on, and `limit` was allowed. `step` 0: before any."""

    event: Literal["hang.detected"] = "hang.detected"
    phase: str
    step: int
    seconds: float
    limit: float
    last_lines: list[Words]


class EngineLost(_Event):
    """Written by the supervisor, which starts the engine again while the attempt goes on. `last_lines`: of its log.

    url        where `engine.serving` will say that it is back
    exit_code  as Python gives it, negative for a signal; None: it runs, and answers nothing
    """

    event: Literal["engine.lost"] = "engine.lost"
    engine: int
    url: Words = ""
    exit_code: int | None = None
    reason: Words
    last_lines: list[Words]


class EngineServing(_Event):
    """Written by the supervisor: a lost engine answers again, `seconds` after that was noticed. Whoever asks it next
    gives it the adapter of the last weight sync."""

    event: Literal["engine.serving"] = "engine.serving"
    url: Words
    seconds: float


class RankStraggling(_Event):
    """A rank has been slower than its peers, several steps in a row, at what it does alone: its `seconds` in `step`
    against the median of the others of its role. Said once until it is over."""

    event: Literal["rank.straggling"] = "rank.straggling"
    step: int
    role: str
    rank: int
    node: str
    seconds: float
    median_of_others: float


class NonFiniteFound(_Event):
    """Losses, gradient norms or tensors that are NaN or infinite after `step`, which is not saved."""

    event: Literal["non_finite"] = "non_finite"
    step: int
    names: list[str]


class DiskLow(_Event):
    """The file system of the run directory is nearly full. Said once by each supervisor."""

    event: Literal["disk.low"] = "disk.low"
    free_bytes: int
    limit_bytes: int


class AttemptEnded(_Event):
    """How an attempt ended: exactly one of exit_code and signal is set. Written by the supervisor, whose driver ended;
    or, `in_place`, by a driver that lost a rank and becomes the next attempt itself.

    step, phase  where the step loop was last heard of; None if it never was
    last_lines   of the log of what died first, which is not always the driver
    oom_kills    processes that the kernel killed meanwhile for want of memory, where it says so
    engine       the one whose loss ended it, if one did
    """

    event: Literal["attempt.ended"] = "attempt.ended"
    exit_code: int | None
    signal: int | None
    reason: Words
    step: int | None = None
    phase: str | None = None
    last_lines: list[Words] = Field(default_factory=list)
    oom_kills: int = 0
    in_place: bool = False
    engine: int | None = None


class RunStopped(_Event):
    """Written by the supervisor when it stops before the run is complete. What failed before it no longer counts."""

    event: Literal["run.stopped"] = "run.stopped"
    exit_code: int
    reason: Words


class RunFinished(_Event):
    event: Literal["run.finished"] = "run.finished"
    planned_steps: int
    last_step: int


Event = Annotated[
    RunStarted
    | AttemptStarted
    | RanksBuilt
    | StateRestored
    | StepDone
    | CheckpointCommitted
    | CheckpointRejected
    | SaveFailed
    | SaveSkipped
    | TopologyChanged
    | CheckpointReplicated
    | ReplicationFailed
    | CheckpointsCoalesced
    | CheckpointsPruned
    | RetentionFailed
    | Evaluated
    | MetricsLogged
    | GenerationRejected
    | FaultWitnessed
    | HangDetected
    | EngineLost
    | EngineServing
    | RankStraggling
    | NonFiniteFound
    | DiskLow
    | AttemptEnded
    | RunStopped
    | RunFinished,
    Field(discriminator="event"),
]

MAX_TENSOR_TABLE = 64 * 1024
"""Bytes of JSON that the tensor table of one step may take in the journal when no checkpoint is due."""
