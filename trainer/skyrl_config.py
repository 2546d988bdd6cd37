"""SkyRL's configuration: parsed and validated by SkyRL, then held to what it does not check and we do not support."""

import trainer.cpu  # noqa: F401  # isort: skip  # first: it answers for CUDA before SkyRL binds torch's names

import dataclasses
import typing
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.utils import validate_cfg

from checkpointing.errors import ConfigError, HarnessError
from trainer.identity import frozen_models
from trainer.supported import require_supported

PLAIN = (int, float, bool, str, int | None, float | None, str | None)


def skyrl_config(overrides: dict[str, Any] | list[str]) -> SkyRLTrainConfig:
    """Parse and validate with SkyRL's own code, then check what this harness does not support.

    Raises:
        ConfigError: with SkyRL's own words, or ours.
    """
    try:
        cfg = SkyRLTrainConfig.from_cli_overrides(overrides)
        _require_types(cfg, "skyrl")
        validate_cfg(cfg)
    except HarnessError:
        raise
    except Exception as error:  # SkyRL raises ValueError, AssertionError, TypeError and OmegaConf's own errors
        raise ConfigError(f"skyrl: {str(error) or repr(error)}") from error
    require_supported(cfg)
    for source in cfg.data.train_data + (cfg.data.val_data or []):
        if "." in Path(source).name and not Path(source).is_file():
            raise ConfigError(f"data: no file {source}")
    frozen_models(cfg)
    return cfg


def _require_types(section: Any, path: str) -> None:
    """SkyRL takes any value for any key, and `epochs: many` fails somewhere in the run. Plain types are checked here.

    Raises:
        ConfigError: names the key, what it should be and what it is.
    """
    hints = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        value, hint = getattr(section, field.name), hints[field.name]
        if dataclasses.is_dataclass(value):
            _require_types(value, f"{path}.{field.name}")
        elif hint in PLAIN:
            try:
                TypeAdapter(hint).validate_python(value)
            except ValidationError as error:
                message = error.errors(include_url=False)[0]["msg"]
                raise ConfigError(f"{path}.{field.name}: {message} (got {value!r})") from error
