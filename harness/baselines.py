"""The same run left alone, twice: kept under a digest of what determines it, so that drills of one run share it."""

import fcntl
import importlib.metadata
import mmap
import platform
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from rich.console import Console

import checkpointing
import harness
import trainer
from checkpointing.canonical import canonical_json, digest
from checkpointing.events import AttemptEnded, EngineLost, RunFinished
from checkpointing.journal import read_journal
from checkpointing.settings import Checkpoints
from harness.clusters import Cluster
from harness.commands import run_to_end
from harness.config import RunConfig, flatten
from harness.engines import EnginePool

_NOT_DETERMINING = {"run_dir", "ray_address", "supervision", "metrics", "checkpoints"}
"""Of a run config: what changes where things lie and what happens after a failure, and no bit of a step."""


def baselines(
    config: RunConfig, folder: Path, engines: EnginePool, console: Console, cluster: Cluster
) -> tuple[Path, Path]:
    """The directories of two runs of `config` on `cluster` that were left alone; made where `folder` has them not.

    They keep their checkpoints in their own directory whatever tiers `config` names. Of drills that want the same ones
    at once, one makes them and the others wait. Raises like `supervise`.
    """
    place = folder / determined_by(config)[:16]
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in ("first", "second"):
            run_dir = place / name
            if not _is_undisturbed(run_dir):
                shutil.rmtree(run_dir, ignore_errors=True)
                alone = config.model_copy(update={"run_dir": run_dir, "checkpoints": Checkpoints()})
                with cluster.started(alone, place / f"{name}-cluster") as joined:
                    run_to_end(joined, console, f"{name} baseline", engines)
    return place / "first", place / "second"


def determined_by(config: RunConfig) -> str:
    """Digest of what the bits of a run follow from: config, versions, our code, data and models, the processor."""
    return digest(
        canonical_json(
            {
                "config": config.model_dump(mode="json", exclude=_NOT_DETERMINING),
                "versions": versions(),
                "code": _code(),
                "files": {str(path): _content(path) for path in _files(config)},
                "processor": _processor(),
            }
        )
    )


@cache
def versions() -> dict[str, str]:
    """{package: version} of everything that is installed, and Python's own."""
    found = {dist.name.lower(): dist.version for dist in importlib.metadata.distributions() if dist.name}
    return found | {"python": platform.python_version()}


def _is_undisturbed(run_dir: Path) -> bool:
    events = [record.event for record in read_journal(run_dir)]
    died = any(isinstance(event, AttemptEnded) and event.exit_code != 0 for event in events)
    lost = any(isinstance(event, EngineLost) for event in events)
    return any(isinstance(event, RunFinished) for event in events) and not died and not lost


def _code() -> str:
    roots = [Path(path) for package in (checkpointing, harness, trainer) for path in package.__path__]
    return digest(canonical_json([_content(path) for root in roots for path in sorted(root.rglob("*.py"))]))


def _files(config: RunConfig) -> Iterator[Path]:
    """Every file that a value of the SkyRL section names, or that lies in a folder that one names."""
    for value in flatten(config.skyrl).values():
        for text in value if isinstance(value, list) else [value]:
            path = Path(text) if isinstance(text, str) and "/" in text else None
            if path is not None and path.is_file():
                yield path
            elif path is not None and path.is_dir():
                yield from sorted(inner for inner in path.rglob("*") if inner.is_file())


def _content(path: Path) -> str:
    if not path.stat().st_size:
        return digest(b"")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return digest(data)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith("model name")), platform.machine())
