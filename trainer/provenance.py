"""What a run was made with: image, commit, and the versions below and beside the packages' (`run.package_versions`)."""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

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
