"""Two real ranks under SkyRL's own FSDPStrategy: what they save the stock way, and what our capture says they hold."""

import os

os.environ["HARNESS_DEVICE"] = "cpu"  # before trainer.cpu is imported
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
os.environ["HF_HUB_OFFLINE"] = "1"

import trainer.cpu  # noqa: F401  # isort: skip  # first: it answers for CUDA before SkyRL binds torch's names

import random
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy
from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
from skyrl.train.config import SkyRLTrainConfig

from checkpointing.store import open_store
from trainer.interchange.write import put_shard
from trainer.state import STATE

WORLD_SIZE = 2
STEP = 5
POLICY = [entry for entry in STATE if entry.owner == "policy"]


def stock_config(base: Path, lora_rank: int) -> SkyRLTrainConfig:
    cfg = SkyRLTrainConfig()
    cfg.trainer.policy.model.path = str(base)
    cfg.trainer.policy.model.lora.rank = lora_rank
    cfg.trainer.train_batch_size = 4
    return cfg


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=WORLD_SIZE)
    for kind, lora_rank in (("lora", 3), ("full", 0)):
        _save(folder / kind, folder / "base", lora_rank)
    dist.barrier()
    dist.destroy_process_group()


def _save(folder: Path, base: Path, lora_rank: int) -> None:
    cfg = stock_config(base, lora_rank)
    policy = cfg.trainer.policy
    strategy = FSDPStrategy(policy.fsdp_config, policy.optimizer_config, policy.model, num_training_steps=10)
    strategy.setup_distributed()
    wrapped: Any = HFModelWrapper(
        str(base), bf16=False, lora_rank=lora_rank, target_modules=policy.model.lora.target_modules
    )
    wrapped, optimizer, scheduler = strategy.prepare((wrapped, None, None))
    for step in range(STEP):
        tokens = torch.randint(0, 60, (2, 8), generator=torch.Generator().manual_seed(step))
        wrapped.model(input_ids=tokens, labels=tokens).loss.backward()
        strategy.optimizer_step(optimizer, wrapped, scheduler)
    rank = dist.get_rank()
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
    np.random.standard_normal()  # leaves a cached second value, which is part of the state
    stock = folder / f"global_step_{STEP}"
    strategy.save_checkpoint(wrapped, str(stock / "policy"), rank, optimizer, scheduler)
    worker = SimpleNamespace(model=wrapped, optimizer=optimizer, scheduler=scheduler)
    for entry in POLICY:
        shard = put_shard(open_store(str(folder / "store")), entry.capture(worker), rank)
        (folder / f"{rank}-{entry.name.replace('/', '-')}.json").write_text(shard.model_dump_json())
    if rank == 0:  # as SkyRL's trainer does
        torch.save({"global_step": STEP, "config": asdict(cfg)}, stock / "trainer_state.pt")  # noqa: TID251
        torch.save({"opaque": object}, stock / "data.pt")  # noqa: TID251
