"""Which cluster a drill names, what each can't do, and who brings a lost node back; see tests/stack/test_cluster.py."""

import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from chaos import faults, nodes
from chaos.plan import PlannedFault
from chaos.process import ProcessId
from checkpointing.errors import ConfigError, HarnessError
from checkpointing.stores import memory
from harness import raylets
from harness.clusters import Cluster, Local, Raylets, Running, find_cluster
from harness.config import RunConfig
from harness.raylets import Profile

from .fault_samples import running, scene, until

REPOSITORY = Path(__file__).parents[2]
CONFIG = RunConfig(run_dir=Path("run"), device="cpu", ray_address="from:1", skyrl={})
SLEEPS = "import time; print('ready', flush=True); time.sleep(600)"


def planned(fault: str, **parameters: Any) -> PlannedFault:
    return PlannedFault(fault=fault, target="policy:0", at="train.begin", parameters=parameters)


def test_a_name_is_local_a_profile_or_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    kinds = {"local": Local, "mission": Raylets, "auto": Running, "10.0.0.1:6379": Running, "ray://head:1": Running}
    assert {name: type(find_cluster(name)) for name in kinds} == kinds
    with pytest.raises(ConfigError, match=r"'misson': .*\(mission in configs/clusters/\)"):
        find_cluster("misson")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "clusters").mkdir(parents=True)
    (tmp_path / "configs" / "clusters" / "mine.yaml").write_text("{nodes: 0, cpus: 1, gpus: 1}")
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        find_cluster("mine")


def test_a_run_joins_what_was_named(tmp_path: Path) -> None:
    with Local().started(CONFIG, tmp_path) as joined:
        assert joined == CONFIG, "as its config says"
    with Running("head:1").started(CONFIG, tmp_path) as joined:
        assert joined == CONFIG.model_copy(update={"ray_address": "head:1"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("cluster", "fault", "reason"),
    [
        (Local(), planned("kill_node", back_after=5), "`back_after` needs a cluster of several"),
        (Local(), planned("kill_node"), None),
        (Local(), planned("kill_head"), None),
        (Running("head:1"), planned("kill_head"), "can't start its head anew"),
        (Running("head:1"), planned("kill_node", back_after=5), None),
        (Raylets(Profile(nodes=1, cpus=1, gpus=1)), planned("kill_head"), "can't start its head anew"),
        (Raylets(Profile(nodes=1, cpus=1, gpus=1)), planned("kill_node"), None),
    ],
)
def test_what_a_cluster_refuses(cluster: Cluster, fault: PlannedFault, reason: str | None) -> None:
    refused = cluster.refuses(fault)
    assert refused is None if reason is None else reason in (refused or "")


def test_a_cluster_that_does_not_start_says_where_to_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with (
        pytest.raises(HarnessError, match=r"did not start, see .*/log"),
        Raylets(Profile(nodes=1, cpus=1, gpus=1)).started(CONFIG, tmp_path),
    ):
        pass
    assert not (tmp_path / "sessions").exists(), "nothing is left to be ended"


@pytest.mark.parametrize(("parameters", "seconds"), [({}, None), ({"back_after": 2.5}, 2.5)])
def test_who_kills_a_node_says_whether_it_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any], seconds: float | None
) -> None:
    fault = faults.load("kill_node")
    with running(SLEEPS) as raylet:
        monkeypatch.setattr(nodes, "raylet_of", lambda pid: psutil.Process(raylet.pid))
        site = {"cluster": tmp_path / "cluster"}
        at = scene(tmp_path / "plan", "kill_node", "policy:1", raylet, parameters=parameters, site=site)
        assert nodes.asked_back(tmp_path / "cluster", raylet) is None
        fault.inject(at)
        assert until(lambda: fault.witness(at))
    assert nodes.asked_back(tmp_path / "cluster", raylet) == seconds
    later = ProcessId(pid=raylet.pid, start_ticks=raylet.start_ticks + 1)
    assert nodes.asked_back(tmp_path / "cluster", later) is None, "it was asked of that raylet alone"


def test_a_lost_node_has_forgotten_what_it_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "RAM", tmp_path)
    for node in ("c-0-0", "c-1-1", "other"):
        monkeypatch.setenv(memory.NODE_VARIABLE, node)
        for run in ("one", "two"):
            memory.from_url(f"memory://{run}").put("key", b"data")
    memory.forget_nodes("c-0-0")
    assert {folder.name for folder in tmp_path.glob("*/*/*")} == {"c-1-1", "other"}
    memory.forget_nodes("c-")
    assert {folder.name for folder in tmp_path.glob("*/*/*")} == {"other"}


class FakeCluster:
    """Stands in for Ray's: a node is a process; `lost` are those that were taken out."""

    def __init__(self) -> None:
        self.lost: list[Any] = []

    def remove_node(self, node: Any, allow_graceful: bool) -> None:
        assert not allow_graceful
        self.lost.append(node)


def test_a_node_comes_back_when_it_was_asked_and_when_its_time_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, added, now = FakeCluster(), list[int](), [100.0]

    def add(place: int) -> raylets._Node:
        added.append(place)
        return here

    made = raylets.RayletCluster.__new__(raylets.RayletCluster)
    gone = [ProcessId(pid=2**22 + n, start_ticks=1) for n in range(2)]
    kept = [raylets._Node(n, f"c-{n}-{n}", f"node {n}", process) for n, process in enumerate(gone)]
    here = raylets._Node(2, "c-2-2", "node 2", ProcessId.current())
    vars(made).update(_cluster=ray, _folder=tmp_path, _nodes=[*kept, here], _due=[])
    monkeypatch.setattr(made, "_add", add)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    nodes.ask_back(tmp_path, gone[1], 5.0)
    made.look()
    assert ray.lost == ["node 0", "node 1"] and added == []
    now[0] = 104.9
    made.look()
    assert added == []
    now[0] = 105.0
    made.look()
    made.look()
    assert (added, len(ray.lost)) == ([1], 2), "once, in its place; the other stays lost"
