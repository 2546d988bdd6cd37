"""What a run was made with: image, commit, and the versions below and beside the packages' (`run.package_versions`).

What the driver process can know of it goes into run.json, once. What ranks run on may be another machine after each
failure: their own answers go into the journal of each attempt.
"""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from checkpointing.events import RanksBuilt

DRIVER = Path("/proc/driver/nvidia/version")


def provenance(environment: Mapping[str, str] = os.environ, driver: Path = DRIVER) -> dict[str, str | None]:
    """For run.json; None is what can't be known here.

    image          by digest, as HARNESS_IMAGE says: a container does not know its own name
    commit         of our source
    nccl           that torch was built with
    nvidia_driver  of the machine that the driver process is on, which may have no GPU
    """
    return {
        "image": environment.get("HARNESS_IMAGE") or None,
        "commit": commit(environment),
        "nccl": _nccl(),
        "nvidia_driver": _nvidia_driver(driver),
    }


class Machine(NamedTuple):
    """Where a rank is. The versions are None where it has no GPU."""

    node: str
    """Ray's id of it."""
    nvidia_driver: str | None
    nccl: str | None


def machine(node: str, driver: Path = DRIVER) -> Machine:
    """Asked by a rank, of itself."""
    import torch

    return Machine(node, _nvidia_driver(driver), _nccl() if torch.cuda.is_available() else None)


def ranks_built(said: Mapping[str, Sequence[Machine]]) -> RanksBuilt:
    """Of what all ranks say, {role: in rank order}. Those of one node say the same."""
    machines = [found for ranks in said.values() for found in ranks]
    return RanksBuilt(
        nvidia_driver={found.node: found.nvidia_driver for found in machines},
        nccl={found.node: found.nccl for found in machines},
    )


def commit(environment: Mapping[str, str] = os.environ) -> str | None:
    """Of the source that runs: in an image what HARNESS_COMMIT says, else that of the git work tree, if it is one."""
    if told := environment.get("HARNESS_COMMIT"):
        return told
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def _nccl() -> str | None:
    """None where torch was built without CUDA."""
    import torch

    version: tuple[int, ...] = torch.cuda.nccl.version() if torch.version.cuda else ()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version)) or None


def _nvidia_driver(file: Path) -> str | None:
    if not file.exists():
        return None
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", file.read_text())
    return found[1] if found else None
