"""The mission's cluster, as drills start it: the fault kills one node, which comes back; nothing is left behind."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import ray
import yaml

from chaos import faults
from chaos.directory import Site
from chaos.process import ProcessId
from checkpointing.stores.memory import NODE_VARIABLE
from harness.clusters import Raylets
from harness.config import RunConfig
from harness.raylets import Profile
from tests.unit.fault_samples import scene

from .conftest import REPOSITORY

PATIENCE = 180.0
"""Seconds, on a busy machine, after which what is waited for does not come."""


def until(look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Rank:
    def where(self) -> tuple[int, str, str]:
        return os.getpid(), os.environ.get(NODE_VARIABLE, ""), ray.get_runtime_context().get_node_id()


def with_gpus() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU") == 2]


def test_a_node_is_killed_and_comes_back(tmp_path: Path) -> None:
    profile = Profile.model_validate(yaml.safe_load((REPOSITORY / "configs" / "clusters" / "mission.yaml").read_text()))
    config = RunConfig(run_dir=tmp_path / "run", device="cpu", skyrl={})
    folder = tmp_path / "cluster"
    with Raylets(profile).started(config, folder) as joined:
        session = json.loads((folder / "sessions").read_text())["session"]
        ray.init(address=joined.ray_address, log_to_driver=False)
        try:
            assert len(with_gpus()) == 3 and len(ray.nodes()) == 4
            mine = ray.get_runtime_context().get_node_id()
            assert mine not in with_gpus(), "the driver hangs on the head, which no drill kills"
            rank = ray.remote(num_cpus=0, num_gpus=1)(Rank)
            ranks = [rank.remote() for _ in range(6)]
            where = ray.get([actor.where.remote() for actor in ranks])
            assert len({name for _, name, _ in where}) == len({node for _, _, node in where}) == 3
            pid, _, node = where[4]
            fault = faults.load("kill_node")
            told = {"parameters": {"back_after": 1}, "site": Site(cluster=folder)}
            at = scene(tmp_path / "plan", "kill_node", "policy:4", ProcessId.of(pid), **told)
            fault.inject(at)
            assert "raylet" in (fault.witness(at) or "")
            others = [ProcessId.of(other) for other, _, there in where if there != node]
            assert len(others) == 4 and not any(other.what_became_of_it() for other in others), "one node alone"
            until(lambda: len(with_gpus()) == 3 and node not in with_gpus())
            again = ray.get([actor.where.remote() for actor in [rank.remote() for _ in range(2)]])
            assert {there for _, _, there in again}.isdisjoint({there for _, _, there in where})
            assert {name for _, name, _ in again}.isdisjoint({name for _, name, _ in where}), "with no memory of before"
        finally:
            ray.shutdown()
        # Whoever started the raylets is killed: they end by themselves, before anybody cleans up. Ray's agents, which
        # have nobody left to serve, take a minute more.
        os.kill(session, 9)
        until(lambda: all(name.endswith("Agent") for name in members(session)))
    assert members(session) == []
    assert not (folder / "sessions").exists()


def members(session: int) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found
