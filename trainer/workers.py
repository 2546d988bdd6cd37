"""SkyRL's FSDP workers, plus the State: each rank captures, digests, writes and restores its own shards."""

import trainer.cpu  # isort: skip  # must come first: it answers for CUDA before SkyRL binds torch's names

import os
from typing import Any

import ray
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import (
    FSDPCriticWorkerBase,
    FSDPPolicyWorkerBase,
    FSDPRefWorkerBase,
)

from checkpointing.errors import CheckpointError
from checkpointing.manifest import Shard
from checkpointing.phases import reached
from checkpointing.store import open_store
from trainer.determinism import make_torch_deterministic
from trainer.shards import digest_entries, read_entries, write_entries
from trainer.state import entries_of


class StatefulRank:
    """Mixin over a SkyRL worker. `role` names the actor group; the rank is the worker's own."""

    role: str
    cfg: Any
    _rank: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        make_torch_deterministic()
        reached("worker.started", role=self.role, rank=self._rank, pid=os.getpid())

    def offload_to_cpu(self, *args: Any, **kwargs: Any) -> None:
        """On a CPU everything is there already; SkyRL's version would divide by the number of GPUs."""
        if not trainer.cpu.on_cpu():
            super().offload_to_cpu(*args, **kwargs)  # type: ignore[misc]

    def backload_to_gpu(self, *args: Any, **kwargs: Any) -> None:
        if not trainer.cpu.on_cpu():
            super().backload_to_gpu(*args, **kwargs)  # type: ignore[misc]

    def digest_state(self) -> dict[str, Shard]:
        return digest_entries(entries_of(self.role, self.cfg), self, self._rank)

    def write_state(self, store_url: str, step: int) -> dict[str, Shard]:
        reached("save.capture", role=self.role, rank=self._rank, step=step)
        return write_entries(entries_of(self.role, self.cfg), self, open_store(store_url), self._rank)

    def read_state(self, store_url: str, shards: dict[str, Shard]) -> dict[str, Shard]:
        """Restore this rank; returns the digests of what it holds afterwards."""
        foreign = [name for name, shard in shards.items() if shard.rank != self._rank]
        if foreign:
            raise CheckpointError(f"{self.role} rank {self._rank} was given another rank's shard of {foreign[0]}")
        reached("restore.rank", role=self.role, rank=self._rank)
        return read_entries(entries_of(self.role, self.cfg), self, open_store(store_url), shards)


class _TrainedRank(StatefulRank):
    """Says where a training step is, so that a drill can address it."""

    def forward_backward(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        self._step = data.metadata["global_step"]
        reached("train.forward_backward", role=self.role, rank=self._rank, step=self._step)
        return super().forward_backward(data, *args, **kwargs)  # type: ignore[misc]

    def optim_step(self) -> float:
        reached("train.optimizer", role=self.role, rank=self._rank, step=self._step)
        norm: float = super().optim_step()  # type: ignore[misc]
        return norm


class _PolicyRank(_TrainedRank, FSDPPolicyWorkerBase):
    role = "policy"

    async def init_weight_sync_state(self, inference_engine_client: Any, inference_engine_cfg: Any) -> None:
        if self.cfg.policy.model.lora.rank > 0:
            # Adapters travel through disk and HTTP: there is no NCCL channel to open, on any device.
            self._weight_sync_inference_client = inference_engine_client
        else:
            await super().init_weight_sync_state(inference_engine_client, inference_engine_cfg)


class _CriticRank(_TrainedRank, FSDPCriticWorkerBase):
    role = "critic"


class _RefRank(StatefulRank, FSDPRefWorkerBase):
    role = "ref"


PolicyWorker = ray.remote(num_gpus=1)(_PolicyRank)
CriticWorker = ray.remote(num_gpus=1)(_CriticRank)
RefWorker = ray.remote(num_gpus=1)(_RefRank)
