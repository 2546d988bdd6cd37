"""What the run takes of a Ray cluster: placement groups that are used again, and as many nodes as there are."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from skyrl.backends.skyrl_train.workers import worker
from skyrl.train import trainer as skyrl_trainer
from skyrl.train.utils.utils import validate_cfg

from checkpointing.errors import ClusterTooSmall
from trainer.setup import Setup

LOOK_SECONDS = 1.0
ANSWER_SECONDS = 30.0
"""A node that runs no task for so long is taken for lost. The first one waits for a worker process."""


class PlacementGroups:
    """Stands in for Ray's `placement_group` where SkyRL asks for one: a rebuilt actor group gets the one it had.

    SkyRL keeps no handle of the groups that it makes, so that each rebuild would leak one, with its GPUs.
    """

    def __init__(self) -> None:
        self._make: Callable[..., Any] = worker.placement_group
        self._all: list[tuple[Any, Any]] = []
        self._free: list[tuple[Any, Any]] = []

    def install(self) -> None:
        worker.placement_group = skyrl_trainer.placement_group = self

    def __call__(self, bundles: Sequence[dict[str, float]], strategy: str) -> Any:
        wanted = (list(bundles), strategy)
        for index, (asked, group) in enumerate(self._free):
            if asked == wanted:
                del self._free[index]
                return group
        group = self._make(bundles, strategy=strategy)
        self._all.append((wanted, group))
        return group

    def reuse(self) -> None:
        """Whatever was in them has ended."""
        self._free = list(self._all)

    def drop(self) -> None:
        """Give them back to Ray: other ones will be needed."""
        for _, group in self._all:
            ray.util.remove_placement_group(group)
        self._all, self._free = [], []


def fit(cfg: Any, groups: PlacementGroups, setup: Setup) -> bool:
    """Wait until the cluster has the nodes that `cfg` asks for. If it does not get them and may go on with fewer,
    change `cfg` and return True.

    Raises:
        ClusterTooSmall: nodes are missing after `node_wait_seconds`, and the run may not or can't go on with the rest.
    """
    place = cfg.trainer.placement
    wanted, gpus = place.policy_num_nodes, place.policy_num_gpus_per_node
    deadline = time.monotonic() + setup.node_wait_seconds
    while (there := nodes_with(gpus)) < wanted and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    if there >= wanted:
        return False
    waited = f"after {setup.node_wait_seconds:.0f} s"
    missing = f"the run needs {wanted} nodes with {gpus} GPUs each, and {waited} there are {there}"
    if not setup.fewer_nodes:
        raise ClusterTooSmall(f"{missing}: bring nodes back, or allow fewer with supervision.fewer_nodes")
    for fewer in range(there, 0, -1):
        if _runs_on(cfg, fewer):
            groups.drop()
            return True
    raise ClusterTooSmall(f"{missing}, and its batches can't be divided among those: bring nodes back")


def nodes_with(gpus: int) -> int:
    """Nodes that have so many GPUs, whoever uses them now, and run a task that is sent there: a node that has just died
    is on Ray's list for some seconds more."""
    listed = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= gpus]
    there = [NodeAffinitySchedulingStrategy(node, soft=False) for node in listed]
    calls = [_answer.options(scheduling_strategy=strategy).remote() for strategy in there]
    answered, _ = ray.wait(calls, num_returns=len(calls), timeout=ANSWER_SECONDS) if calls else ([], [])
    return sum(_came_back(call) for call in answered)


@ray.remote(num_cpus=0, max_retries=0)
def _answer() -> None:
    pass


def _came_back(call: Any) -> bool:
    try:
        ray.get(call)
    except ray.exceptions.RayError:
        return False
    return True


def _runs_on(cfg: Any, nodes: int) -> bool:
    """Set `cfg` to so many nodes for all roles. False, and nothing is changed, if SkyRL refuses."""
    place = cfg.trainer.placement
    if place.colocate_all:
        return False  # it has as many engines as ranks
    roles = ("policy", "critic", "ref")
    before = {role: getattr(place, f"{role}_num_nodes") for role in roles}
    for role in roles:
        setattr(place, f"{role}_num_nodes", nodes)
    try:
        validate_cfg(cfg)
    except (AssertionError, ValueError):
        for role, number in before.items():
            setattr(place, f"{role}_num_nodes", number)
        return False
    return True
