"""A drill: which run, which faults, and what is expected of it. A YAML file in configs/drills/:

run: configs/test.yaml
set: {skyrl.trainer.epochs: 1}
faults: [{fault: kill, target: "policy:1", at: train.optimizer, step: 3}]
expect: {seconds_down: 300, steps_repeated: 1}
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from chaos import faults
from chaos.plan import PlannedFault
from checkpointing.errors import ConfigError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Expectations(_Section):
    """What makes a drill pass. Limits hold for each recovery of the run."""

    verdict: Literal["identical", "topology changed"] = Field(
        default="identical",
        description="bit for bit as the run left alone; or so only until it goes on with other numbers of ranks",
    )
    seconds_down: float | None = Field(
        default=None, gt=0, description="from the end of an attempt to the end of the first step after it, at most"
    )
    steps_repeated: int | None = Field(default=None, ge=0, description="steps done once more, at most")
    exit_code: int = Field(default=0, description="what the run ends with; another than 0: it is to stop there")
    recoveries: int | None = Field(
        default=None,
        ge=0,
        description="attempts that must end, or engines be lost, at least; without it 1 if one is killed, else 0",
    )


class RandomFaults(_Section):
    """Faults at steps that are drawn: the intervals are exponential, the faults equally likely."""

    seed: int = 0
    mean_steps: float = Field(gt=0, description="steps from one fault to the next, on average")
    faults: tuple[PlannedFault, ...] = Field(min_length=1, description="to draw from; their `step` is drawn")
    last_copy: bool = Field(default=False, description="whether storage faults may hit every tier of the run")


class Drill(_Section):
    run: Path = Field(description="run config")
    set: dict[str, Any] = Field(default={}, description="keys of it to change, dotted: skyrl.trainer.epochs")
    cluster: str = Field(default="local", description="local, a file of configs/clusters/, or the address of one")
    disk_bytes: int | None = Field(
        default=None, ge=1 << 20, description="the file tier lies on a file system of its own of this size"
    )
    faults: tuple[PlannedFault, ...] = ()
    random: RandomFaults | None = None
    expect: Expectations = Expectations()

    @model_validator(mode="after")
    def _breaks_something(self) -> "Drill":
        if not self.faults and self.random is None:
            raise ValueError("a drill needs `faults` or `random`")
        return self

    def schedule(self, steps: int, tiers: int, seed: int | None = None) -> tuple[PlannedFault, ...]:
        """The faults of a run of `steps` steps with checkpoints on `tiers` tiers; `seed` instead of the drill's."""
        if self.random is None:
            return self.faults
        return (*self.faults, *draw(self.random, steps, tiers, self.random.seed if seed is None else seed))


def load_drill(path: Path) -> Drill:
    """Raises ConfigError: no such file, not this schema, a fault that is not possible; Unavailable: one is not here."""
    try:
        drill = Drill.model_validate(yaml.safe_load(path.read_text()))
        for planned in (*drill.faults, *(drill.random.faults if drill.random else ())):
            planned.check()
    except faults.Unavailable as error:
        raise faults.Unavailable(f"{path}: {error}") from error
    except (OSError, yaml.YAMLError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "top level"
        raise ConfigError(f"{path}: {where}: {first['msg']}") from error
    return drill


def draw(told: RandomFaults, steps: int, tiers: int, seed: int) -> Iterator[PlannedFault]:
    """Faults at rising steps of 1..`steps`, the same for the same arguments; never two at one step.

    Without `last_copy` at least one of the tiers is never damaged.
    """
    source, step, damaged = random.Random(seed), 0, set[str]()
    while True:
        step += max(1, round(source.expovariate(1 / told.mean_steps)))
        if step > steps:
            return
        allowed = [one for one in told.faults if told.last_copy or _leaves_a_copy(one, damaged, tiers)]
        if not allowed:
            return
        chosen = source.choice(allowed)
        if _damages(chosen):
            damaged.add(chosen.target)
        yield chosen.model_copy(update={"step": step})


def _damages(planned: PlannedFault) -> bool:
    return faults.find(planned.fault).KIND == "store"


def _leaves_a_copy(planned: PlannedFault, damaged: set[str], tiers: int) -> bool:
    return not _damages(planned) or len(damaged | {planned.target}) < tiers
