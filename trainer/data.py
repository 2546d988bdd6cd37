"""Training batches whose order is a pure function of (seed, epoch), so that a position is two integers.

Used instead of torchdata's StatefulDataLoader (docs/decisions/0001-derived-data-order.md): its state is opaque, differs
with `num_workers`, and at an epoch's end makes the next epoch come out empty.
"""

import atexit
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from checkpointing.canonical import canonical_json, digest
from checkpointing.errors import CheckpointError
from trainer.stopping import ignore_sigterm


def epoch_order(size: int, seed: int, epoch: int) -> list[int]:
    """The permutation of `range(size)` for one epoch."""
    key = hashlib.sha256(f"{seed}/epoch/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
    order: list[int] = torch.randperm(size, generator=generator).tolist()
    return order


class _Remaining(Sampler[list[int]]):
    """Index lists of the batches that the loader has not yet handed out in its current epoch."""

    def __init__(self, loader: "EpochLoader") -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        loader = self.loader
        order = epoch_order(len(loader.dataset), loader.seed, loader.epoch)
        for batch in range(loader.batch, len(loader)):
            yield order[batch * loader.batch_size : (batch + 1) * loader.batch_size]

    def __len__(self) -> int:
        return len(self.loader) - self.loader.batch


class EpochLoader:
    """Iterating once yields what is left of the current epoch; after `epochs` epochs it yields nothing.

    `epoch` and `batch` count what was handed out, never what workers have fetched ahead. The last partial batch of an
    epoch is dropped, as SkyRL does.
    """

    def __init__(self, dataset: Any, batch_size: int, epochs: int, seed: int, num_workers: int = 0) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.epochs = epochs
        self.seed = seed
        self.epoch = 0
        self.batch = 0
        self._generator = torch.Generator()  # of our own, or each iterator would draw from the driver's global stream
        self._loader = DataLoader(
            dataset,
            batch_sampler=_Remaining(self),
            collate_fn=dataset.collate_fn,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            # Ray runs threads and gRPC in this process: forking it may deadlock.
            multiprocessing_context="spawn" if num_workers else None,
            generator=self._generator,
            worker_init_fn=ignore_sigterm,  # one that dies of it would take the driver along
        )

        if num_workers:
            # torch would end them by SIGTERM, and wait for ever.
            atexit.register(self.close)

    def close(self) -> None:
        """End the loader's worker processes."""
        atexit.unregister(self.close)
        workers: Any = self._loader._iterator
        if workers is not None:
            workers._shutdown_workers()

    def __len__(self) -> int:
        """Batches in a full epoch."""
        return len(self.dataset) // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        if self.batch == len(self):
            self.epoch, self.batch = self.epoch + 1, 0
        if self.epoch >= self.epochs:
            return
        self._generator.manual_seed(self.seed + self.epoch)
        for batch in self._loader:
            self.batch += 1
            yield batch

    @property
    def exhausted(self) -> bool:
        return (self.epoch, self.batch) >= (self.epochs - 1, len(self))

    def position(self) -> dict[str, int]:
        """JSON-able. At an epoch's end `batch` equals `len(self)`: the next iteration starts the next epoch in full."""
        return {"epoch": self.epoch, "batch": self.batch, "batch_size": self.batch_size, "size": len(self.dataset)}

    def seek(self, position: dict[str, int]) -> None:
        """Continue after `position`.

        Raises:
            CheckpointError: it was taken with another batch size or another number of prompts.
        """
        for key, mine in (("batch_size", self.batch_size), ("size", len(self.dataset))):
            if position[key] != mine:
                raise CheckpointError(
                    f"data position: the checkpoint was saved with {key}={position[key]}, this run has {mine}; "
                    "resume with the same data and trainer.train_batch_size, or start a new run directory"
                )
        self.epoch, self.batch = position["epoch"], position["batch"]


def dataset_fingerprint(sources: list[str], dataset: Any) -> str:
    """Digest of what the prompts are: the bytes of the files they come from, or the rows where they are no local files.

    The number of prompts left after SkyRL's length filter is part of it: another tokenizer or limit is another dataset.
    """
    if all(Path(source).is_file() for source in sources):
        content = [digest(Path(source).read_bytes()) for source in sources]
    else:
        content = [digest(canonical_json(dataset[index])) for index in range(len(dataset))]
    return digest(canonical_json({"content": content, "prompts": len(dataset)}))


def planned_steps(cfg: Any, prompts: int) -> int:
    """GRPO steps that a run over `prompts` prompts is meant to take under SkyRL's config."""
    steps: int = prompts // cfg.trainer.train_batch_size * cfg.trainer.epochs
    limit = cfg.trainer.max_training_steps
    return steps if limit is None else min(steps, limit)
