"""How long training stands still, against what SkyRL, torch and Orbax make it wait for with the same State."""

import gc
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks.processes import Rank, Ranks, stop_seconds
from benchmarks.profile import Profile
from benchmarks.report import Figure
from trainer.rank_state import capture_optimizer, capture_parameters


class _Peer(Protocol):
    def save(self, at: Path) -> list[float]:
        """Save to `at`, to the end. Seconds that training stands still for it, in one or more senses."""
        ...

    def close(self) -> None: ...


def peers(profile: Profile) -> Iterator[Figure]:
    with profile.ranks() as ranks, profile.folder("peers") as folder:
        ranks.seconds(stop_seconds)
        yield from _against(ranks, profile, folder, _Skyrl, [("SkyRL's save_checkpoint", 0.1)])
        yield from _against(ranks, profile, folder, _DcpCached, [("DCP async_save with cached staging", 1.0)])
        staged, returned = (
            ("DCP async_save with asynchronous staging, until staged", 1.0),
            ("the same, until it returns", None),
        )
        yield from _against(ranks, profile, folder, _DcpAsync, [staged, returned])
        yield from _against(ranks, profile, folder, _Orbax, [("Orbax async save", 1.0)])


def _against(
    ranks: Ranks, profile: Profile, folder: Path, kind: type, names: list[tuple[str, float | None]]
) -> Iterator[Figure]:
    """Our stop against those that `kind.save` reports, one for each of `names`."""
    ranks.call(_open, kind)
    count = iter(range(1000))

    def save() -> list[float]:
        at = folder / f"{kind.__name__}-{next(count)}"
        seconds = [max(stops) for stops in zip(*ranks.call(_save, at), strict=True)]
        shutil.rmtree(at)
        return seconds

    save()  # its first fills its caches, as ours did
    ours, theirs = [], []
    for _ in range(profile.repetitions):
        ours.append(ranks.seconds(stop_seconds))
        theirs.append(save())
    ranks.call(_close)
    for index, (name, target) in enumerate(names):
        yield Figure("peers", f"stop / {name}", target, ours, [stops[index] for stops in theirs])


def _open(rank: Rank, kind: type) -> None:
    rank.kept["peer"] = kind(rank)


def _save(rank: Rank, at: Path) -> list[float]:
    dist.barrier()
    peer: _Peer = rank.kept["peer"]
    return peer.save(at)


def _close(rank: Rank) -> None:
    rank.kept.pop("peer").close()
    gc.collect()


class _Skyrl:
    """The real FSDPStrategy, which writes before it returns. It does not fsync."""

    def __init__(self, rank: Rank) -> None:
        os.environ["HARNESS_DEVICE"] = "cpu"
        import trainer.cpu  # noqa: F401  # isort: skip  # first: it answers for CUDA before SkyRL binds torch's names
        from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy
        from skyrl.train.config import SkyRLTrainConfig
        from transformers import PretrainedConfig

        policy = SkyRLTrainConfig().trainer.policy
        self._strategy = FSDPStrategy(policy.fsdp_config, policy.optimizer_config, policy.model)
        self._strategy.setup_distributed()
        self._rank, self._worker = rank, rank.worker
        self._worker.model.config = PretrainedConfig()

    def save(self, at: Path) -> list[float]:
        worker, start = self._worker, time.perf_counter()
        self._strategy.save_checkpoint(worker.model, str(at), self._rank.rank, worker.optimizer, worker.scheduler)
        return [time.perf_counter() - start]

    def close(self) -> None:
        del self._worker.model.config


def _state_dict(rank: Rank) -> dict[str, Any]:
    """The same tensors, whole DTensors as torch's distributed checkpoint wants them."""
    worker, names = rank.worker, {p: name for name, p in rank.worker.model.named_parameters()}
    moments = {f"{key}/{names[p]}": v for p, state in worker.optimizer.state.items() for key, v in state.items()}
    return {"model": worker.model.state_dict(), "optimizer": moments}


class _DcpCached:
    """Copies into a cache before it returns."""

    asynchronous = False

    def __init__(self, rank: Rank) -> None:
        self._state = _state_dict(rank)
        self._group = dist.new_group(backend="gloo")  # its thread must not meet our barriers
        self._stager = DefaultStager(StagingOptions(False, False, self.asynchronous, False))

    def save(self, at: Path) -> list[float]:
        start = time.perf_counter()
        saved: Any = async_save(self._state, checkpoint_id=at, process_group=self._group, async_stager=self._stager)
        stopped = [time.perf_counter() - start]
        if self.asynchronous:
            saved.staging_completion.result()
            stopped.insert(0, time.perf_counter() - start)
            saved = saved.upload_completion
        saved.result()
        return stopped

    def close(self) -> None:
        self._stager.close()


class _DcpAsync(_DcpCached):
    """Returns at once, but nothing may be trained until it has staged."""

    asynchronous = True


class _Orbax:
    """One a rank, on views of that rank's shards."""

    def __init__(self, rank: Rank) -> None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        import orbax.checkpoint as ocp

        parts = capture_parameters(rank.worker), capture_optimizer(rank.worker)
        self._state = {name: _array(tensor) for part in parts for name, tensor in part.tensors.items()}
        self._rank, self._ocp = rank.rank, ocp
        self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())

    def save(self, at: Path) -> list[float]:
        at.mkdir(exist_ok=True)
        start = time.perf_counter()
        self._checkpointer.save(at / str(self._rank), args=self._ocp.args.PyTreeSave(self._state))
        stopped = time.perf_counter() - start
        self._checkpointer.wait_until_finished()
        return [stopped]

    def close(self) -> None:
        self._checkpointer.close()


def _array(tensor: torch.Tensor) -> Any:
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
