"""The plan's directory, where a fault leaves word so that it fires once and can be witnessed after its victim's death.

fired/<index>.json      created once, before the fault is injected, by the process that is about to inject it
outcome/<index>.json    written when `inject` came back: what was then seen of it, if anything. A process that killed
                        itself can't write it; one that should have died and lives does, and so gives itself away
processes/<name>.json   the newest process of each name (`driver`, `policy-1`), so that one can break another
"""

import os
import tempfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from chaos.process import ProcessId
from checkpointing.disk import fsync_dir


class Fired(BaseModel):
    """A fault of the plan (`index` is its position there) that was about to be injected into `process`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    index: int
    fault: str
    target: str
    phase: str
    step: int
    process: ProcessId
    injector: ProcessId


class Outcome(BaseModel):
    """Seen by the injector right after the injection; no evidence means that the fault did nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    evidence: str | None


class PlanDirectory:
    def __init__(self, path: Path) -> None:
        self._fired = path / "fired"
        self._outcome = path / "outcome"
        self._processes = path / "processes"

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

    def announce(self, name: str, process: ProcessId) -> None:
        path = self._processes / f"{name.replace(':', '-')}.json"
        _written_aside(path, process).replace(path)

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
