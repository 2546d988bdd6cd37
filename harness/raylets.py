"""`python -m harness.raylets PROFILE_JSON FOLDER NAME`: raylets on this machine that play the nodes of a cluster.

Writes FOLDER/address once every node is there. A node that was lost comes back where its killer has asked for that
(`chaos.nodes.ask_back`), as Kubernetes brings one back, with its memory empty. Ends when it is killed: whatever it has
started ends with it.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from pydantic import BaseModel, ConfigDict, Field

from chaos.nodes import asked_back
from chaos.process import ProcessId
from checkpointing.stores.memory import NODE_VARIABLE, forget_nodes

_LOOK_SECONDS = 0.2
_ALL = {"node_ip_address": "127.0.0.1", "include_dashboard": False}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Head(_Section):
    cpus: int = Field(default=1, ge=0)


class Profile(_Section):
    """A file of configs/clusters/: a head without a GPU, and `nodes` nodes with so many `cpus` and `gpus` each."""

    head: Head = Head()
    nodes: int = Field(ge=1)
    cpus: int = Field(ge=1)
    gpus: int = Field(ge=0, description="logical ones, where the run's device is cpu")


class _Node(NamedTuple):
    """`place` among the profile's nodes, from 0.

    `name`: what HARNESS_NODE says on it, never the same again: what it kept in memory is lost with it.
    """

    place: int
    name: str
    node: Any
    raylet: ProcessId


class RayletCluster:
    """A head without a GPU, for the driver to attach to: Ray prefers it. Then the nodes."""

    def __init__(self, profile: Profile, folder: Path, name: str) -> None:
        from ray.cluster_utils import Cluster

        self._profile, self._folder, self._name, self._started = profile, folder, name, 0
        head = {"num_cpus": profile.head.cpus, "num_gpus": 0, "no_monitor": True}
        self._cluster = Cluster(initialize_head=True, head_node_args=_ALL | head)
        self._nodes = [self._add(place) for place in range(profile.nodes)]
        self._cluster.wait_for_nodes()
        self._due: list[tuple[float, int]] = []
        """Nodes that will be back: (when, by the monotonic clock; place)."""

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def look(self) -> None:
        """Take note of nodes that were lost, and bring back those whose time has come."""
        for lost in [node for node in self._nodes if node.raylet.what_became_of_it()]:
            self._nodes.remove(lost)
            self._cluster.remove_node(lost.node, allow_graceful=False)
            forget_nodes(lost.name)
            seconds = asked_back(self._folder, lost.raylet)
            _say(f"{lost.name} is lost, and " + ("stays so" if seconds is None else f"will be back in {seconds:g} s"))
            if seconds is not None:
                self._due.append((time.monotonic() + seconds, lost.place))
        for when, place in [one for one in self._due if time.monotonic() >= one[0]]:
            self._due.remove((when, place))
            self._nodes.append(self._add(place))

    def _add(self, place: int) -> _Node:
        name, before = f"{self._name}-{place}-{self._started}", set(_raylets())
        self._started += 1
        node = self._cluster.add_node(
            wait=False,
            num_cpus=self._profile.cpus,
            num_gpus=self._profile.gpus,
            env_vars={NODE_VARIABLE: name},
            **_ALL,
        )
        (pid,) = set(_raylets()) - before
        _say(f"{name} is there: raylet {pid}")
        return _Node(place, name, node, ProcessId.of(pid))


def _raylets() -> Iterator[int]:
    return (child.pid for child in psutil.Process().children() if child.name() == "raylet")


def _say(what: str) -> None:
    print(what, flush=True)


def main() -> None:
    profile, folder, name = Profile.model_validate_json(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    cluster = RayletCluster(profile, folder, name)
    aside = folder / "address.tmp"
    aside.write_text(cluster.address)
    aside.replace(folder / "address")
    while True:
        cluster.look()
        time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    main()
