"""Where the runs of a drill find their nodes: the machine itself, raylets on it that play nodes, or a real Ray cluster.

Nothing else in a drill file depends on which of them it is. Processes are named by role and rank (`driver`, `policy:4`,
`keeper:1`: see `chaos.plan`), a node by a process that is on it; never by a pid, host or address. What is left to know
is a `Cluster`: how a run joins it, and which faults can't be had there.
"""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import yaml
from pydantic import ValidationError

from chaos.plan import PlannedFault
from checkpointing.errors import ConfigError, HarnessError
from checkpointing.stores.memory import forget_nodes
from harness.config import RunConfig
from harness.processes import reap, spawn
from harness.raylets import Profile
from trainer.determinism import environment
from trainer.own_cluster import ON_LOOPBACK

PROFILES = Path("configs/clusters")
_START_SECONDS = 180.0
_NO_HEAD = "a run joins this cluster and can't start its head anew: drill that with `cluster: local`"


class Cluster(Protocol):
    def refuses(self, planned: PlannedFault) -> str | None:
        """None where the fault can be had on this cluster, else why not."""

    def started(self, config: RunConfig, folder: Path) -> AbstractContextManager[RunConfig]:
        """Have it for one run: `config` as it joins it. What belongs to the cluster lies in `folder`.

        Raises:
            HarnessError: it did not start.
        """


class Local:
    """What the run config says: mostly a cluster of one node, which each driver starts for itself."""

    def refuses(self, planned: PlannedFault) -> str | None:
        if planned.parameters.get("back_after") is not None:
            return "the next attempt starts its only node anyway: `back_after` needs a cluster of several"
        return None

    @contextmanager
    def started(self, config: RunConfig, folder: Path) -> Iterator[RunConfig]:
        yield config


class Running:
    """A Ray cluster that somebody else runs. Its lost nodes come back when that one (Kubernetes, say) lets them."""

    def __init__(self, address: str) -> None:
        self._address = address

    def refuses(self, planned: PlannedFault) -> str | None:
        return _NO_HEAD if planned.fault == "kill_head" else None

    @contextmanager
    def started(self, config: RunConfig, folder: Path) -> Iterator[RunConfig]:
        yield config.model_copy(update={"ray_address": self._address})


class Raylets:
    """Raylets on this machine, a cluster for each run: `harness.raylets` starts them and lets lost ones come back."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def refuses(self, planned: PlannedFault) -> str | None:
        return _NO_HEAD if planned.fault == "kill_head" else None

    @contextmanager
    def started(self, config: RunConfig, folder: Path) -> Iterator[RunConfig]:
        ledger, address, name = folder / "sessions", folder / "address", f"cluster-{uuid.uuid4().hex[:12]}"
        reap(ledger)  # of a drill that was killed
        address.unlink(missing_ok=True)
        command = [sys.executable, "-m", "harness.raylets"]
        env = os.environ | environment(config.device) | {"RAY_USAGE_STATS_ENABLED": "0"} | ON_LOOPBACK
        process = spawn(
            [*command, self._profile.model_dump_json(), str(folder.resolve()), name], env, folder / "log", ledger
        )
        try:
            _wait(process, address, folder / "log")
            with variables(ON_LOOPBACK):
                yield config.model_copy(update={"ray_address": address.read_text()})
        finally:
            reap(ledger)
            process.wait()
            forget_nodes(name)


def find_cluster(name: str) -> Cluster:
    """`local`, the name of a file in configs/clusters/, or the address of a running cluster.

    Raises:
        ConfigError: none of them, or the file is wrong.
    """
    if name == "local":
        return Local()
    path = PROFILES / f"{name}.yaml"
    if path.is_file():
        try:
            return Raylets(Profile.model_validate(yaml.safe_load(path.read_text())))
        except (OSError, yaml.YAMLError, ValidationError) as error:
            raise ConfigError(f"{path}: {error}") from error
    if name == "auto" or ":" in name:
        return Running(name)
    profiles = ", ".join(sorted(path.stem for path in PROFILES.glob("*.yaml"))) or "none"
    raise ConfigError(
        f"cluster {name!r}: name `local`, a profile ({profiles} in {PROFILES}/), or HOST:PORT of a cluster"
    )


@contextmanager
def variables(wanted: dict[str, str]) -> Iterator[None]:
    """In the environment of this process and what it starts."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _wait(process: subprocess.Popen[bytes], address: Path, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not address.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise HarnessError(f"the cluster of raylets did not start, see {log}")
        time.sleep(0.05)
