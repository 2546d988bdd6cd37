"""The plan's directory, where a fault leaves word so that it fires once and can be witnessed after its victim's death.

fired/<index>.json      created once, before the fault is injected, by the process that is about to inject it
injected/<index>.json   of a fault that lasts: `inject` came back, the process that fired it may go on
outcome/<index>.json    what was seen of it, if anything. A process that killed itself can't write it; one that should
                        have died and lives does, and so gives itself away
healed/<index>.json     of a fault that lasts: it is over
notes/<index>.json      what the fault says to its own witness and healer (`chaos.scene`)
processes/<name>.json   the newest process of each name (`driver`, `policy-1`), so that one can break another
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from chaos.process import ProcessId
from checkpointing.disk import fsync_dir


class Site(BaseModel):
    """The run that a plan is for: {target: where it is}.

    stores   {"store:file": URL} of its tiers, by their names
    proxies  {"engine:0" or "store:s3": folder of the proxy in front of it}

    `cluster`: the folder of whoever runs the nodes (`chaos.nodes.ask_back`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_dir: Path | None = None
    cluster: Path | None = None
    stores: dict[str, str] = Field(default_factory=dict)
    proxies: dict[str, str] = Field(default_factory=dict)


class Fired(BaseModel):
    """A fault of the plan (`index` is its position there) that was about to be injected into `process`.

    `process` is None where the target is none. `time`: when, in Unix seconds; the rest as in the plan.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    index: int
    fault: str
    target: str
    phase: str
    step: int
    process: ProcessId | None
    injector: ProcessId
    time: float = 0.0
    seconds: float | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    site: Site = Site()


class Outcome(BaseModel):
    """What was seen; no evidence means that the fault did nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    evidence: str | None


class _Mark(BaseModel):
    """That something happened."""


class PlanDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._fired = path / "fired"
        self._outcome = path / "outcome"
        self._processes = path / "processes"

    @property
    def notes(self) -> Path:
        return self.path / "notes"

    def claim(self, fired: Fired) -> bool:
        """True for exactly one caller of each index, ever; durable when it returns."""
        return _create_once(self._fired / f"{fired.index}.json", fired)

    def fired(self) -> list[Fired]:
        paths = sorted(self._fired.glob("*.json"), key=lambda path: int(path.stem))
        return [Fired.model_validate_json(path.read_bytes()) for path in paths]

    def write_outcome(self, index: int, outcome: Outcome) -> None:
        _create_once(self._outcome / f"{index}.json", outcome)

    def outcome(self, index: int) -> Outcome | None:
        path = self._outcome / f"{index}.json"
        return Outcome.model_validate_json(path.read_bytes()) if path.exists() else None

    def mark(self, what: str, index: int) -> None:
        """`what` is "injected" or "healed"."""
        _create_once(self.path / what / f"{index}.json", _Mark())

    def is_marked(self, what: str, index: int) -> bool:
        return (self.path / what / f"{index}.json").exists()

    def announce(self, name: str, process: ProcessId) -> None:
        path = self._processes / f"{name.replace(':', '-')}.json"
        _written_aside(path, process).replace(path)

    def announced(self) -> dict[str, ProcessId]:
        """The newest process of each name."""
        paths = {path.stem.replace("-", ":"): path for path in self._processes.glob("*.json")}
        return {name: ProcessId.model_validate_json(path.read_bytes()) for name, path in paths.items()}

    def find(self, name: str) -> ProcessId | None:
        path = self._processes / f"{name.replace(':', '-')}.json"
        return ProcessId.model_validate_json(path.read_bytes()) if path.exists() else None


def _create_once(path: Path, content: BaseModel) -> bool:
    """Whole or not at all, unlike O_EXCL: a reader never meets a file whose writer died before it was filled."""
    aside = _written_aside(path, content)
    try:
        os.link(aside, path)
    except FileExistsError:
        return False
    finally:
        aside.unlink()
    fsync_dir(path.parent)
    return True


def _written_aside(path: Path, content: BaseModel) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as aside:
        aside.write(content.model_dump_json())
        aside.flush()
        os.fsync(aside.fileno())
    return Path(aside.name)
