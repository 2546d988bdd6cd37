"""The journal's vocabulary: one class per event, its fields are what later readers may rely on.

Digests are lower-case hex. Floats that must compare bit for bit are written by `float.hex()`.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Event(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


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


class CheckpointCommitted(_Event):
    event: Literal["checkpoint.committed"] = "checkpoint.committed"
    step: int
    commit: str
    bytes_total: int
    seconds: float


class CheckpointRejected(_Event):
    event: Literal["checkpoint.rejected"] = "checkpoint.rejected"
    step: int
    commit: str
    reason: str


class Evaluated(_Event):
    """`step` 0 is the base model, before any training. Metrics are plain floats as the trainer logs them."""

    event: Literal["evaluated"] = "evaluated"
    step: int
    metrics: dict[str, float]


class FaultWitnessed(_Event):
    """Seen from outside: the process that the fault aimed at was alive before and is gone after."""

    event: Literal["fault.witnessed"] = "fault.witnessed"
    index: int
    fault: str
    target: str
    phase: str
    step: int
    pid: int
    evidence: str


class AttemptEnded(_Event):
    """Written by the supervisor: how the driver process ended. Exactly one of exit_code and signal is set."""

    event: Literal["attempt.ended"] = "attempt.ended"
    exit_code: int | None
    signal: int | None
    reason: str


class RunFinished(_Event):
    event: Literal["run.finished"] = "run.finished"
    planned_steps: int
    last_step: int


Event = Annotated[
    RunStarted
    | AttemptStarted
    | StateRestored
    | StepDone
    | CheckpointCommitted
    | CheckpointRejected
    | Evaluated
    | FaultWitnessed
    | AttemptEnded
    | RunFinished,
    Field(discriminator="event"),
]

MAX_TENSOR_TABLE = 64 * 1024
"""Bytes of JSON that the tensor table of one step may take in the journal when no checkpoint is due."""
