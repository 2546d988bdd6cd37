"""SkyRL's FSDP workers, plus the State: each rank captures, digests, writes and restores its own shards."""

import trainer.cpu  # isort: skip  # must come first: it answers for CUDA before SkyRL binds torch's names

import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
import torch
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import (
    FSDPCriticWorkerBase,
    FSDPPolicyWorkerBase,
    FSDPRefWorkerBase,
)

from checkpointing.blobs import get_blob
from checkpointing.errors import CorruptBlob
from checkpointing.manifest import Shard
from checkpointing.phases import reached
from checkpointing.staging import Staged, StagingBuffer
from checkpointing.trace import trace_phases
from trainer.determinism import make_torch_deterministic
from trainer.keeper import sources
from trainer.late import late
from trainer.logs import use_own_log
from trainer.provenance import Machine, machine
from trainer.shards import Fetched, digest_entries, fetch_entries, not_finite, restore_entries
from trainer.staging import stage_entries
from trainer.state import entries_of
from trainer.stopping import ignore_sigterm
from trainer.stragglers import finish_queued_work, probe_seconds


class StatefulRank:
    """Mixin over a SkyRL worker. `role` names the actor group; the rank is the worker's own."""

    role: str
    cfg: Any
    _rank: int
    _world_size: int
    _digest_seconds = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        use_own_log(self.role, kwargs["rank"])
        super().__init__(*args, **kwargs)
        make_torch_deterministic()
        ignore_sigterm()
        self._buffer = StagingBuffer()
        self._fetched: Fetched = {}
        trace_phases()
        reached("worker.started", role=self.role, rank=self._rank, pid=os.getpid())

    def offload_to_cpu(self, *args: Any, **kwargs: Any) -> None:
        """On a CPU everything is there already; SkyRL's version would divide by the number of GPUs."""
        if not trainer.cpu.on_cpu():
            super().offload_to_cpu(*args, **kwargs)  # type: ignore[misc]

    def backload_to_gpu(self, *args: Any, **kwargs: Any) -> None:
        if not trainer.cpu.on_cpu():
            super().backload_to_gpu(*args, **kwargs)  # type: ignore[misc]

    def digest_state(self) -> dict[str, Shard]:
        finish_queued_work(_device())
        started = time.monotonic()
        shards = digest_entries(entries_of(self.role, self.cfg), self, self._rank)
        self._digest_seconds = time.monotonic() - started
        return shards

    def own_seconds(self) -> float:
        """What this rank took for its last `digest_state` and takes for a probe of its device, waiting for nobody."""
        return self._digest_seconds + probe_seconds(_device())

    def not_finite(self) -> list[str]:
        return not_finite(entries_of(self.role, self.cfg), self)

    def machine(self) -> Machine:
        return machine(str(ray.get_runtime_context().get_node_id()))

    def stage_state(self, step: int) -> Staged:
        """Copy this rank's entries to where its node's keeper reads them. Training may go on when it returns."""
        reached("save.capture", role=self.role, rank=self._rank, step=step)
        return stage_entries(entries_of(self.role, self.cfg), self, self._buffer, self._rank, step)

    def fetch_state(
        self, urls: list[str], peers: list[Any], shards: dict[str, Sequence[Shard]], step: int
    ) -> str | None:
        """Read and verify what this rank would restore, from the nearest tier that has it.

        `shards` holds for each entry those of all ranks that saved it; if that was another number of ranks, this rank
        makes its own of them. Returns what is wrong, None if nothing is.
        """
        reached("restore.rank", role=self.role, rank=self._rank)
        read = partial(get_blob, sources(urls, peers))
        try:
            place = (self._rank, self._world_size)
            self._fetched = fetch_entries(entries_of(self.role, self.cfg), self, place, shards, read, step)
        except CorruptBlob as error:
            return str(error)
        return None

    def restore_state(self) -> tuple[dict[str, Shard], dict[str, Shard]]:
        """Restore this rank from what it has fetched. Digests of what it was to hold, and of what it holds."""
        fetched, self._fetched = self._fetched, {}
        expected = {name: shard for name, (_, shard) in fetched.items()}
        return expected, restore_entries(entries_of(self.role, self.cfg), self, fetched, self._rank)


def _device() -> torch.device:
    return torch.device("cpu") if trainer.cpu.on_cpu() else torch.device("cuda", torch.cuda.current_device())


class _TrainedRank(StatefulRank):
    """Says where a training step is, so that a drill can address it."""

    def forward_backward(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        self._step = data.metadata["global_step"]
        reached("train.forward_backward", role=self.role, rank=self._rank, step=self._step)
        return super().forward_backward(data, *args, **kwargs)  # type: ignore[misc]

    def optim_step(self) -> float:
        reached("train.optimizer", role=self.role, rank=self._rank, step=self._step, owner=self)
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


PolicyWorker = ray.remote(num_gpus=1)(late(_PolicyRank))
CriticWorker = ray.remote(num_gpus=1)(late(_CriticRank))
RefWorker = ray.remote(num_gpus=1)(late(_RefRank))
