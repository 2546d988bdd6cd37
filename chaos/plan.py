"""Which faults a run is to meet, and where. A JSON file:

{"faults": [{"fault": "kill", "target": "policy:1", "at": "train.optimizer", "step": 3}]}
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from chaos import faults
from chaos.directory import Site
from checkpointing.errors import ConfigError
from checkpointing.phases import DRIVER_PHASES, OWNER_PHASES, PHASES

ProcessName = Annotated[str, Field(pattern=r"^(driver|supervisor|[a-z_]+:\d+)$")]
"""`driver`, `supervisor`, or role and rank: `policy:1`, `critic:0`, `engine:0`."""

Target = Annotated[str, Field(pattern=r"^(driver|supervisor|[a-z_]+:\d+|store:[a-z0-9+-]+)$")]
"""A process, or a tier: `store:file`."""


class PlannedFault(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    fault: str
    """A module of `chaos.faults`."""
    target: Target
    at: str
    """A name of `checkpointing.phases.PHASES`."""
    step: int | None = Field(default=None, ge=0)
    """None: at any step."""
    nth: int = Field(default=1, ge=1)
    """At the nth time that one process reaches `at` (at that step) in its life."""
    reached_by: ProcessName | None = None
    """Which process must reach `at`. None: the driver, where only drivers reach it, else the target itself."""
    seconds: float | None = Field(default=None, gt=0)
    """Until a fault that lasts is healed. None: when the driver of that time has ended."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """The fault's own: see its module."""

    @field_validator("at")
    @classmethod
    def _known_phase(cls, at: str) -> str:
        if at not in PHASES:
            raise ValueError(f"there is no phase {at!r}; there are: {', '.join(sorted(PHASES))}")
        return at

    @property
    def trigger(self) -> str:
        """The process whose reaching `at` fires this."""
        return self.reached_by or ("driver" if self.at in DRIVER_PHASES else self.target)

    def __str__(self) -> str:
        place = f"{self.at}" + (f", step {self.step}" if self.step is not None else "")
        return f"{self.fault} {self.target} at {place}" + (f" (time {self.nth})" if self.nth > 1 else "")

    def check(self) -> None:
        """Raises ConfigError: no such fault, wrong parameters, not possible at this place; Unavailable: not here."""
        fault = faults.load(self.fault)
        try:
            fault.Parameters.model_validate(self.parameters)
        except ValidationError as error:
            raise ConfigError(f"the fault {self.fault!r}: {_wrong(error)}") from error
        if self.seconds is not None and not faults.lasts(fault):
            raise ConfigError(f"the fault {self.fault!r} is over once it is injected: leave out `seconds`")
        of_store = fault.KIND in ("store", "remote")
        if of_store != self.target.startswith("store:") or (fault.KIND == "engine") > self.target.startswith("engine:"):
            wanted = {"engine": "engine:0", "store": "store:file", "remote": "store:s3"}.get(fault.KIND, "driver")
            raise ConfigError(f"the fault {self.fault!r} breaks a target such as {wanted}, not {self.target}")
        if fault.KIND == "remote" and self.target.startswith(("store:file", "store:memory")):
            raise ConfigError(f"the fault {self.fault!r} breaks a tier that is reached by HTTP, not {self.target}")
        if self.trigger.startswith("store:"):
            raise ConfigError(f"the fault {self.fault!r} at {self.at}: say by which process it is `reached_by`")
        if fault.KIND == "rank" and (self.at not in OWNER_PHASES or self.trigger != self.target):
            raise ConfigError(
                f"the fault {self.fault!r} works from within a rank: at {', '.join(sorted(OWNER_PHASES))}, and reached "
                "by the target itself"
            )


class FaultPlan(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    faults: tuple[PlannedFault, ...]
    site: Site = Site()

    @classmethod
    def load(cls, path: Path) -> "FaultPlan":
        """Raises ConfigError: no such file, not this schema, or a fault that `PlannedFault.check` refuses."""
        try:
            plan = cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"fault plan {path} can't be read: {error.strerror}") from error
        except ValidationError as error:
            raise ConfigError(f"fault plan {path} is wrong: {_wrong(error)}") from error
        try:
            for planned in plan.faults:
                planned.check()
        except ConfigError as error:
            raise ConfigError(f"fault plan {path}: {error}") from error
        return plan


def _wrong(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
