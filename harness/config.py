"""The run config: a few keys of ours, and SkyRL's own under `skyrl:`."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from checkpointing.errors import ConfigError
from checkpointing.settings import Checkpoints
from trainer.maze.spec import MazeSpec

OWNED = {
    "trainer.ckpt_path": "run_dir",
    "trainer.export_path": "run_dir",
    "trainer.log_path": "run_dir",
    "trainer.policy.model.lora.lora_sync_path": "run_dir",
    "generator.inference_engine.external_server_urls": "engines",
    "generator.inference_engine.external_proxy_url": "engines",
}
"""SkyRL keys that the harness sets, and the key of ours that decides them."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Engines(_Section):
    """Standalone inference servers that the harness starts and that outlive a driver."""

    count: int = Field(default=1, ge=1, description="servers; requests are spread over them")
    args: dict[str, Any] = Field(default_factory=dict, description="vLLM flags without dashes; true for a switch")
    continuation: bool = Field(
        default=False,
        description="after a failure unfinished generations go on after their last tokens; only where `harness doctor` "
        "says that they can",
    )

    @field_validator("args")
    @classmethod
    def _on_loopback(cls, args: dict[str, Any]) -> dict[str, Any]:
        """Nobody sends an engine a token, so that one which listened elsewhere would serve, and obey, everybody."""
        for name in args:
            if name.replace("_", "-") in ("host", "port", "uds", "api-key"):
                raise ValueError(
                    f"{name} is not yours to set: engines listen on 127.0.0.1 and ask for no token; remove it"
                )
        return args


class Supervision(_Section):
    """When the supervisor starts another attempt, and when it gives up. See docs/operations.md."""

    restarts_per_hour: int = Field(default=20, ge=0, description="attempts that may fail within an hour")
    poison_after: int = Field(
        default=2, ge=1, description="failures in the same place of the same step before an older checkpoint is tried"
    )
    on_non_finite: Literal["restore", "stop"] = Field(
        default="restore", description="after a NaN: go back to an older checkpoint, once, or stop at once"
    )
    backoff_seconds: float = Field(
        default=2.0, ge=0, description="wait before another attempt after one without progress; doubles each time"
    )
    phase_seconds: float = Field(
        default=600.0, gt=0, description="silence of the step loop that is never a hang; what the run shows raises it"
    )
    wide_seconds: float = Field(
        default=3600.0, gt=0, description="the same for start, restore, evaluation, saves, and what was not seen yet"
    )
    engine_seconds: float = Field(
        default=120.0, gt=0, description="silence of an engine's health check after which it is started anew"
    )
    grace_seconds: float = Field(
        default=60.0, gt=0, description="from SIGTERM to the end: time to commit what has been captured"
    )
    node_wait_seconds: float = Field(
        default=600.0, ge=0, description="wait so long for nodes of the Ray cluster that are missing"
    )
    fewer_nodes: bool = Field(
        default=False, description="then go on with the nodes that are left; else stop. Such a run is not bit-identical"
    )
    disk_low_bytes: int = Field(
        default=10 * 1024**3, ge=0, description="free space of the run directory under which the journal says disk.low"
    )


class Metrics(_Section):
    """Where Prometheus finds what there is to know of the run. See docs/operations.md."""

    port: int = Field(default=0, ge=0, le=65535, description="0: nowhere")
    address: str = Field(
        default="127.0.0.1",
        description="what to listen on; where others can reach it, HARNESS_METRICS_TOKEN must be set and is asked for",
    )


class RunConfig(_Section):
    """One run. Unknown keys and wrong types are errors."""

    run_dir: Path
    device: Literal["cpu", "gpu"] = "gpu"
    ray_address: str = Field(default="local", description='"local" for a cluster of its own, else the address of one')
    supervision: Supervision = Field(default=Supervision(), description="restarts, deadlines and limits")
    environments: dict[str, str] = Field(default_factory=dict, description="SkyRL-Gym id -> module:Class")
    engines: Engines | None = Field(default=None, description="without it SkyRL starts its engines itself")
    metrics: Metrics = Field(default=Metrics(), description="an endpoint for Prometheus")
    checkpoints: Checkpoints = Field(default=Checkpoints(), description="where checkpoints go; see docs/operations.md")
    maze: MazeSpec | None = Field(default=None, description="the maze task and base model to build before the run")
    skyrl: dict[str, Any]

    def skyrl_overrides(self, engine_urls: list[str]) -> dict[str, Any]:
        """SkyRL's configuration as dotted keys, completed with what the harness owns."""
        flat = flatten(self.skyrl)
        run_dir = self.run_dir.resolve()
        flat |= {
            "trainer.ckpt_path": str(run_dir),
            "trainer.export_path": str(run_dir / "export"),
            "trainer.log_path": str(run_dir / "logs"),
            "trainer.policy.model.lora.lora_sync_path": str(run_dir / "adapter"),
        }
        if engine_urls:
            flat["generator.inference_engine.run_engines_locally"] = False
            flat["generator.inference_engine.external_server_urls"] = engine_urls
            if len(engine_urls) == 1:  # with more, SkyRL starts its router in front of them
                flat["generator.inference_engine.external_proxy_url"] = engine_urls[0]
        return flat


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; an empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, dict) and value
        flat |= flatten(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat


def load_config[C: RunConfig](path: Path, kind: type[C]) -> C:
    """Read and validate a run config.

    Raises:
        ConfigError: no such file, no YAML, unknown key, wrong type, or a SkyRL key that the harness owns.
    """
    try:
        raw = yaml.safe_load(path.read_text())
        config = kind.model_validate(raw)
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "top level"
        raise ConfigError(f"{path}: {where}: {first['msg']} (got {str(first['input'])[:60]!r})") from error
    for key in flatten(config.skyrl):
        if key in OWNED:
            raise ConfigError(f"{path}: skyrl.{key} is decided by `{OWNED[key]}`; remove it")
    return config
