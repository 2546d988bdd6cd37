"""The run config: a few keys of ours, and SkyRL's own under `skyrl:`."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from checkpointing.errors import ConfigError
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


class RunConfig(_Section):
    """One run. Unknown keys and wrong types are errors."""

    run_dir: Path
    device: Literal["cpu", "gpu"] = "gpu"
    ray_address: str = Field(default="local", description='"local" for a cluster of its own, else the address of one')
    max_attempts: int = Field(default=20, ge=1, description="attempts of one `harness run` before it gives up")
    environments: dict[str, str] = Field(default_factory=dict, description="SkyRL-Gym id -> module:Class")
    engines: Engines | None = Field(default=None, description="without it SkyRL starts its engines itself")
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
