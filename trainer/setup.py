"""What the harness decides about a run, beside SkyRL's own config."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpointing.settings import Checkpoints


@dataclass(frozen=True)
class Setup:
    """How and where a driver trains.

    directory    the run directory
    device       "cpu" or "gpu"
    checkpoints  where they go
    ray_address  "local", or the address of a running cluster
    envs         {SkyRL-Gym id: "module:Class"} of environments to register
    engines      how standalone engines were started: their flags (`args`) and whether unfinished generations can go on
                 (`continuation`); empty where SkyRL starts its own

    The rest is of `harness.config.Supervision`.
    """

    directory: Path
    device: str
    checkpoints: Checkpoints
    ray_address: str = "local"
    envs: dict[str, str] = field(default_factory=dict)
    engines: dict[str, Any] = field(default_factory=dict)
    restarts_per_hour: int = 20
    node_wait_seconds: float = 600.0
    fewer_nodes: bool = False
