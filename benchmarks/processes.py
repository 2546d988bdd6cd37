"""Processes that hold a State as training does, and do what they are told at the same moment."""

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from checkpointing.blobs import Blob
from checkpointing.commit import Commit, commit, start_attempt
from checkpointing.manifest import Entry, Manifest, Shard
from checkpointing.staging import Staged, StagingBuffer, write_staged
from checkpointing.store import open_store
from trainer.staging import stage_entries
from trainer.state import STATE

ENTRIES = [entry for entry in STATE if entry.owner == "policy"]

_CONTEXT = multiprocessing.get_context("forkserver")  # fresh processes, but torch and the rest are imported only once
_CONTEXT.set_forkserver_preload([__name__])


@dataclass(frozen=True)
class Shapes:
    """The parameters of a model: global shapes, and one dtype ("float32", "bfloat16")."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"


def full_model(state_bytes: int, dtype: str) -> Shapes:
    """100 parameters which with AdamW's two moments are about `state_bytes`."""
    width = 1024 if state_bytes >= 1 << 28 else 256
    rows = state_bytes // 3 // getattr(torch, dtype).itemsize // 25 // width
    block = ((rows // 4, width), (rows * 3 // 8, width), (rows * 3 // 8, width), (width,))
    return Shapes(block * 25, dtype)


def lora_adapter(layers: int, rank: int = 16) -> Shapes:
    """The adapters of `layers` layers of an 8B model (hidden 4096, keys and values 1024, MLP 12288)."""
    modules = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 12288), (4096, 12288), (12288, 4096)]
    layer = [shape for inner, outer in modules for shape in ((rank, inner), (outer, rank))]
    return Shapes(tuple(layer * layers))


@dataclass
class Rank:
    """One training process: its shards of an FSDP2 model and of AdamW's state, and its staging buffer."""

    rank: int
    worker: Any
    buffer: StagingBuffer = field(default_factory=StagingBuffer)
    staged: Staged | None = None
    kept: dict[str, Any] = field(default_factory=dict)
    """What a measurement keeps warm from one repetition to the next."""

    @classmethod
    def make(cls, rank: int, world_size: int, rendezvous: Path, shapes: Shapes) -> Self:
        torch.set_num_threads(1)  # on both sides of every ratio: ranks and writers already fill the cores
        torch.manual_seed(rank)  # ranks that hold the same would write it once
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
        return cls(rank, _trained(shapes, world_size))

    def together(self, action: Callable[[], Any]) -> float:
        """Seconds that `action` takes here, begun when every rank is ready to."""
        dist.barrier()
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    def stage(self, step: int = 1) -> None:
        self.staged = stage_entries(ENTRIES, self.worker, self.buffer, self.rank, step)


def _trained(shapes: Shapes, world_size: int) -> Any:
    module = torch.nn.ParameterList(torch.empty(shape, dtype=getattr(torch, shapes.dtype)) for shape in shapes.shapes)
    model = torch.nn.Module()
    model.layers = module
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for parameter in model.parameters():
        local(parameter).normal_(0, 0.02)
        parameter.grad = parameter.detach().clone()
        local(parameter.grad).normal_()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler)


def local(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.detach()
    assert isinstance(whole, DTensor)
    return whole.to_local()


class Keeper:
    """The process that writes what ranks have staged, as `trainer/keeper.py`'s does, and then commits it."""

    def __init__(self, url: str) -> None:
        self.store = open_store(url)
        self._attempt = start_attempt(self.store, None)
        self._parent: Commit | None = None

    def save(self, staged: Sequence[Staged]) -> Manifest:
        with ThreadPoolExecutor(len(staged)) as pool:
            parts: list[dict[str, Shard]] = list(pool.map(lambda part: write_staged(part, [self.store]), staged))
        entries = {name: Entry.of(name, [part[name] for part in parts]) for name in parts[0]}
        manifest = Manifest(step=staged[0].step, topology={"policy": len(staged)}, entries=entries, run={})
        self._parent = commit(self.store, self._attempt, manifest, self._parent)
        return manifest

    def drop(self, blobs: Sequence[Blob]) -> None:
        for blob in blobs:
            self.store.delete(blob.key)


class Process:
    """A process that holds what `make(*args)` returns, as a context manager. `send` and `receive` alternate."""

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        self._pipe, other = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(other, make, args), daemon=True)
        self._process.start()
        other.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, action: Callable[..., Any], *args: Any) -> None:
        """Have `action(what is held, *args)` done there."""
        self._pipe.send((action, args))

    def receive(self) -> Any:
        result, error = self._pipe.recv()
        if error is not None:
            raise RuntimeError(f"a process of the benchmark failed:\n{error}")
        return result

    def call(self, action: Callable[..., Any], *args: Any) -> Any:
        self.send(action, *args)
        return self.receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()  # which it takes for its end
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    held, failed = None, None
    try:
        held = make(*args)
    except Exception:
        failed = traceback.format_exc()  # for whoever asks first
    while True:
        try:
            action, rest = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            pipe.send((None, failed) if failed else (action(held, *rest), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))


class Ranks:
    """`world_size` ranks of one model, as a context manager."""

    def __init__(self, world_size: int, rendezvous: Path, shapes: Shapes) -> None:
        self._ranks = [Process(Rank.make, rank, world_size, rendezvous, shapes) for rank in range(world_size)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        for rank in self._ranks:
            rank.__exit__()

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks]

    def call(self, action: Callable[..., Any], *args: Any) -> list[Any]:
        """`action(rank, *args)` in every rank at the same time. What each returned, in rank order."""
        for rank in self._ranks:
            rank.send(action, *args)
        return [rank.receive() for rank in self._ranks]

    def seconds(self, action: Callable[..., Any], *args: Any) -> float:
        """Like `call` of an action that returns seconds: those of the slowest rank."""
        return float(max(self.call(action, *args)))

    def stage(self, step: int) -> list[Staged]:
        """Stage a State that differs in one element of each entry from the one before, so that its blobs are new."""
        return self.call(_stage_changed, step)


def stop_seconds(rank: Rank) -> float:
    """What training would stand still for here."""
    return rank.together(rank.stage)


def _stage_changed(rank: Rank, step: int) -> Staged:
    parameter = next(rank.worker.model.parameters())
    for tensor in (parameter, rank.worker.optimizer.state[parameter]["exp_avg"]):
        local(tensor).view(-1)[0] = step
    rank.stage(step)
    assert rank.staged is not None
    return rank.staged
