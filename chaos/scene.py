"""What a fault acts on: who and where it was planned for, and a folder in which it leaves word."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from chaos.directory import Fired
from chaos.process import ProcessId
from checkpointing.errors import ConfigError


class Parameters(BaseModel):
    """What a plan may say to a fault; a fault that can be told something has its own, with fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Scene:
    """`owner` is what the process that reached the phase has put there, for faults inside a rank; None outside it."""

    fired: Fired
    parameters: Any
    folder: Path
    owner: Any = None

    @property
    def process(self) -> ProcessId:
        """The target. Raises ConfigError where it is no process."""
        if self.fired.process is None:
            raise ConfigError(f"the fault {self.fired.fault!r} breaks a process, {self.fired.target} is none")
        return self.fired.process

    @property
    def store(self) -> str:
        """The URL of the store that is the target. Raises ConfigError."""
        return self._placed("stores", "the run has no such tier")

    @property
    def store_folder(self) -> Path:
        """The folder of the store that is the target. Raises ConfigError: it has none of its own."""
        if not self.store.startswith("file://"):
            raise ConfigError(f"the fault {self.fired.fault!r} breaks a file system, {self.store} is none")
        return Path(self.store.removeprefix("file://"))

    @property
    def proxy(self) -> Path:
        """The folder of the proxy (`chaos.proxy`) in front of the target. Raises ConfigError."""
        return Path(self._placed("proxies", "no proxy is in front of it"))

    def note(self, facts: dict[str, Any]) -> None:
        """Leave word for the witness and the healer, who may be other processes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.fired.index}.json"
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps(self.noted() | facts))
        aside.replace(path)

    def noted(self) -> dict[str, Any]:
        path = self.folder / f"{self.fired.index}.json"
        facts: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return facts

    def _placed(self, what: str, otherwise: str) -> str:
        place: str | None = getattr(self.fired.site, what).get(self.fired.target)
        if place is None:
            raise ConfigError(f"the fault {self.fired.fault!r} can't break {self.fired.target}: {otherwise}")
        return place


def anywhere() -> str | None:
    """The `available` of a fault that can be done on every machine."""
    return None


def nothing_to_heal(scene: Scene) -> None:
    """The `heal` of a fault that is over once it is injected."""
