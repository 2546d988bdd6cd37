"""Which faults a run is to meet, and where. A JSON file:

{"faults": [{"fault": "kill", "target": "policy:1", "at": "train.optimizer", "step": 3}]}
"""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from chaos import faults
from checkpointing.errors import ConfigError
from checkpointing.phases import DRIVER_PHASES, PHASES

ProcessName = Annotated[str, Field(pattern=r"^(driver|[a-z_]+:\d+)$")]
"""`driver`, or role and rank: `policy:1`, `critic:0`, `engine:0`."""


class PlannedFault(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    fault: str
    """A module of `chaos.faults`."""
    target: ProcessName
    at: str
    """A name of `checkpointing.phases.PHASES`."""
    step: int | None = Field(default=None, ge=0)
    """None: at any step."""
    nth: int = Field(default=1, ge=1)
    """At the nth time that one process reaches `at` (at that step) in its life."""
    reached_by: ProcessName | None = None
    """Which process must reach `at`. None: the driver, where only drivers reach it, else the target itself."""

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


class FaultPlan(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    faults: tuple[PlannedFault, ...]

    @classmethod
    def load(cls, path: Path) -> "FaultPlan":
        """Raises ConfigError: no such file, not this schema, an unknown phase or fault, a fault not available here."""
        try:
            plan = cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"fault plan {path} can't be read: {error.strerror}") from error
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
            raise ConfigError(f"fault plan {path} is wrong: {wrong}") from error
        try:
            for planned in plan.faults:
                faults.load(planned.fault)
        except ConfigError as error:
            raise ConfigError(f"fault plan {path}: {error}") from error
        return plan
