"""When a driver goes on by itself after it has lost a rank, with which placement groups, and on how many nodes."""

import trainer.cpu  # isort: skip

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import ray
import torch

from checkpointing.errors import ClusterTooSmall, ConfigError, RankLost, WorkerLost
from checkpointing.events import AttemptEnded
from checkpointing.journal import Journal, read_journal
from checkpointing.progress import ProgressFile
from checkpointing.settings import Checkpoints
from trainer import cluster
from trainer.cluster import PlacementGroups, fit
from trainer.failures import first_cause
from trainer.rebuilding import end_attempt, furthest, may_rebuild
from trainer.setup import Setup

del trainer


def setup(directory: Path, **limits: Any) -> Setup:
    return Setup(directory, "cpu", Checkpoints(), **limits)


def trainer_of(directory: Path, attempt: int, digested: int, before: tuple[int, ...] = (), lora: int = 8) -> Any:
    run = SimpleNamespace(
        directory=directory,
        attempt=SimpleNamespace(attempt=attempt),
        steps_before=dict.fromkeys(before),
        journal=Journal(directory, "driver", attempt),
    )
    model = SimpleNamespace(lora=SimpleNamespace(rank=lora))
    return SimpleNamespace(
        run=run,
        step_journal=SimpleNamespace(digested=digested),
        global_step=digested + 1,
        dispatch=object(),
        cfg=SimpleNamespace(trainer=SimpleNamespace(policy=SimpleNamespace(model=model))),
    )


def test_a_rank_is_replaced_once_without_a_new_step(tmp_path: Path) -> None:
    first = trainer_of(tmp_path, attempt=1, digested=0)
    assert may_rebuild(first, setup(tmp_path), -1), "even if no step was done yet"
    then = furthest(first)
    assert not may_rebuild(trainer_of(tmp_path, 2, digested=0), setup(tmp_path), then), "no further: not our decision"
    assert may_rebuild(trainer_of(tmp_path, 2, digested=1), setup(tmp_path), then)


def test_steps_done_again_are_no_new_ones(tmp_path: Path) -> None:
    """Also after ranks fell back to an older commit, which makes a further attempt."""
    before = trainer_of(tmp_path, 1, digested=5, before=(1, 2, 3))
    assert furthest(before) == 5
    assert not may_rebuild(trainer_of(tmp_path, 3, digested=4, before=(1, 2, 3, 4, 5)), setup(tmp_path), 5)
    assert may_rebuild(trainer_of(tmp_path, 3, digested=6, before=(1, 2, 3, 4, 5)), setup(tmp_path), 5)


def test_ranks_that_never_were_complete_are_not_replaced_beside_what_is_left_of_them(tmp_path: Path) -> None:
    building = trainer_of(tmp_path, 1, digested=0)
    building.dispatch = None
    assert not may_rebuild(building, setup(tmp_path), -1)


def test_with_full_weights_engines_are_in_a_collective_with_the_lost_rank(tmp_path: Path) -> None:
    assert not may_rebuild(trainer_of(tmp_path, 1, digested=3, lora=0), setup(tmp_path), -1)


def test_the_hours_budget_holds_for_it_too(tmp_path: Path) -> None:
    for attempt in (1, 2):
        end_attempt(trainer_of(tmp_path, attempt, digested=attempt), RankLost("a rank died"))
    third = trainer_of(tmp_path, attempt=3, digested=3)
    assert may_rebuild(third, setup(tmp_path, restarts_per_hour=3), 2)
    assert not may_rebuild(third, setup(tmp_path, restarts_per_hour=2), 2)


def test_what_is_said_of_the_attempt_that_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = tmp_path / "progress.json"
    monkeypatch.setenv("HARNESS_PROGRESS", str(progress))
    ProgressFile(progress).hear("train.begin", {"step": 5})
    lost = RankLost("policy rank 1 died at step 5")
    lost.__cause__ = RuntimeError("worker died\nby SIGKILL")
    end_attempt(trainer_of(tmp_path, attempt=1, digested=4), lost)
    (record,) = read_journal(tmp_path)
    ended = record.event
    assert isinstance(ended, AttemptEnded)
    assert (record.attempt, ended.exit_code, ended.signal, ended.in_place) == (1, 17, None, True)
    assert (ended.step, ended.phase, ended.reason) == (5, "train", "policy rank 1 died at step 5")
    assert ended.last_lines == ["worker died", "by SIGKILL"]


def test_of_a_rank_that_left_a_log_its_last_lines_are_kept_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "ranks-1-policy-0-11.log").write_text("of the one that followed")
    (logs / "ranks-1-policy-1-22.log").write_text("first\n\nlogin 0123456789abcdef\ns3://user:hunter22@host\n")
    end_attempt(trainer_of(tmp_path, 1, digested=4), RankLost("policy rank 1 (pid 22) died at step 5"))
    (record,) = read_journal(tmp_path)
    assert isinstance(record.event, AttemptEnded)
    assert record.event.last_lines == ["first", "login ***", "s3://user:***@host"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.distributed.DistBackendError("NCCL error: remote process exited"), RankLost),
        (torch.distributed.DistNetworkError("connection reset"), RankLost),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection reset by peer [127.0.0.1]:1"), RankLost),
        (ray.exceptions.RayActorError(), RankLost),
        (ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory"), RankLost),
        (RuntimeError("Failed to create placement group with 2 bundles"), WorkerLost),
        (aiohttp.ServerDisconnectedError(), WorkerLost),
        (ConfigError("wrong"), ConfigError),
        (ValueError("a bug of the user's"), ValueError),
        (RuntimeError("CUDA out of memory"), RuntimeError),
    ],
)
def test_only_what_a_new_rank_may_cure_is_a_lost_rank(error: Exception, kind: type[Exception]) -> None:
    assert type(first_cause(error, None)) is kind


def test_of_an_error_on_a_rank_the_cause_counts() -> None:
    def raised(error: Exception) -> Exception:
        wrapped: Any = ray.exceptions.RayTaskError("step", "traceback", error)
        raised: Exception = wrapped.as_instanceof_cause()
        return raised

    assert type(first_cause(raised(torch.distributed.DistBackendError("NCCL")), None)) is RankLost
    assert isinstance(first_cause(raised(ValueError("a bug of the user's")), None), ValueError)


def config(nodes: int, gpus: int, colocate: bool = False) -> Any:
    place = SimpleNamespace(colocate_all=colocate)
    for role in ("policy", "critic", "ref"):
        setattr(place, f"{role}_num_nodes", nodes)
        setattr(place, f"{role}_num_gpus_per_node", gpus)
    return SimpleNamespace(trainer=SimpleNamespace(placement=place))


class Cluster:
    """Nodes with so many GPUs each; more may come while somebody waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *gpus: int, coming: tuple[int, ...] = ()) -> None:
        self.gpus, self.coming = list(gpus), list(coming)
        self.now = 0.0
        monkeypatch.setattr(cluster, "nodes_with", self.nodes_with)
        monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(cluster, "validate_cfg", self.validate)

    def nodes_with(self, gpus: int) -> int:
        return sum(count >= gpus for count in self.gpus)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.coming:
            self.gpus.append(self.coming.pop())

    def validate(self, cfg: Any) -> None:
        """A batch of 12: three nodes do, two nodes do, five don't."""
        ranks = cfg.trainer.placement.policy_num_nodes * cfg.trainer.placement.policy_num_gpus_per_node
        if 12 % ranks:
            raise ValueError("not divisible")


def fitted(cfg: Any, tmp_path: Path, **limits: Any) -> bool:
    return fit(cfg, PlacementGroups(), setup(tmp_path, node_wait_seconds=10.0, **limits))


def test_all_nodes_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Cluster(monkeypatch, 2, 2, 2)
    assert not fitted(config(3, 2), tmp_path)
    assert there.now == 0.0


def test_a_node_comes_back_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Cluster(monkeypatch, 2, 2, coming=(2, 1))  # the first to come has a broken GPU
    cfg = config(3, 2)
    assert not fitted(cfg, tmp_path, fewer_nodes=True)
    assert (there.now, cfg.trainer.placement.policy_num_nodes) == (2.0, 3)


def test_a_node_that_stays_away_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cluster(monkeypatch, 2, 1, 2)
    with pytest.raises(ClusterTooSmall, match=r"needs 3 nodes with 2 GPUs each, and after 10 s there are 2: .*fewer_n"):
        fitted(config(3, 2), tmp_path)


@pytest.mark.parametrize(("there", "left"), [((2, 2), 2), ((2, 2, 2, 2, 2), 3), ((2,), 1)])
def test_or_the_run_goes_on_with_as_many_as_divide_its_batches(
    there: tuple[int, ...], left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cluster(monkeypatch, *there)
    cfg = config(6, 2)
    assert fitted(cfg, tmp_path, fewer_nodes=True)
    place = cfg.trainer.placement
    assert [place.policy_num_nodes, place.critic_num_nodes, place.ref_num_nodes] == [left] * 3


@pytest.mark.parametrize(("there", "colocate"), [((), False), ((2, 2), True)])
def test_with_no_node_or_an_engine_per_rank_it_can_not(
    there: tuple[int, ...], colocate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cluster(monkeypatch, *there)
    cfg = config(3, 2, colocate)
    with pytest.raises(ClusterTooSmall, match="can't be divided"):
        fitted(cfg, tmp_path, fewer_nodes=True)
    assert cfg.trainer.placement.policy_num_nodes == 3


def test_a_rebuilt_group_gets_the_placement_group_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    monkeypatch.setattr(ray.util, "remove_placement_group", removed.append)
    made: list[str] = []

    def make(bundles: list[dict[str, float]], strategy: str) -> str:
        made.append(f"group {len(made)}")
        return made[-1]

    groups = PlacementGroups()
    groups._make = make
    pair, one = [{"GPU": 2.0}], [{"GPU": 1.0}]
    assert [groups(pair, "PACK"), groups(one, "PACK"), groups(pair, "PACK")] == made
    assert made == ["group 0", "group 1", "group 2"]
    groups.reuse()
    assert [groups(pair, "PACK"), groups(pair, "PACK"), groups(one, "PACK")] == ["group 0", "group 2", "group 1"]
    assert groups(pair, "PACK") == "group 3", "one more than before"
    groups.drop()
    assert removed == made
    groups.reuse()
    assert groups(pair, "PACK") == "group 4"
