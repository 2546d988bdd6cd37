"""Capture and restore of what lives in one rank of an actor group: parameters, optimizer, LR scheduler, RNG streams.

Every function takes the SkyRL worker (`worker.model`, `.optimizer`, `.scheduler`). Tensors are this rank's own shards;
`data["shards"]` says where each lies in the whole: {"shape": global shape, "offset": of this shard}, in elements.
"""

import random
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from checkpointing.errors import CheckpointError, MissingEntry
from trainer.captured import Captured


def _module(worker: Any) -> torch.nn.Module:
    """The sharded module: SkyRL wraps policy and reference in HFModelWrapper, the critic not."""
    wrapped = type(worker.model).__name__ == "HFModelWrapper"
    module: torch.nn.Module = worker.model.model if wrapped else worker.model
    return module


@torch.no_grad()  # else `to_local` records each tensor for autograd, which costs more than copying a small one
def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


_offset = cache(compute_local_shape_and_global_offset)
"""Same arguments, same answer, and asked for every tensor while training stands still."""


def _placement(tensor: torch.Tensor) -> dict[str, list[int]]:
    if not isinstance(tensor, DTensor):
        return {"shape": list(tensor.shape), "offset": [0] * tensor.ndim}
    _, offset = _offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return {"shape": list(tensor.shape), "offset": list(offset)}


class _Place(NamedTuple):
    """Where a parameter or persistent buffer hangs in a model: what hangs there may be exchanged, the place is not."""

    name: str
    owner: torch.nn.Module
    key: str

    def parameter(self) -> torch.Tensor | None:
        return self.owner._parameters.get(self.key)

    def buffer(self) -> torch.Tensor | None:
        return self.owner._buffers.get(self.key)


@cache
def _places(module: torch.nn.Module) -> tuple[tuple[_Place, ...], tuple[_Place, ...]]:
    """Those of all parameters, and of all buffers that `state_dict` would hold.

    Found once: a walk through the modules of a large model takes longer than copying its adapter.
    """

    def place(name: str) -> _Place:
        owner, _, key = name.rpartition(".")
        return _Place(name, module.get_submodule(owner), key)

    parameters = tuple(place(name) for name, _ in module.named_parameters())
    buffers = (place(name) for name, _ in module.named_buffers())
    return parameters, tuple(b for b in buffers if b.key not in b.owner._non_persistent_buffers_set)


def _parameters(worker: Any) -> dict[str, torch.Tensor]:
    places, _ = _places(_module(worker))
    return {place.name: parameter for place in places if (parameter := place.parameter()) is not None}


def _saved_tensors(worker: Any, frozen: bool) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; frozen parameters only where they may have moved."""
    named = {name: p for name, p in _parameters(worker).items() if p.requires_grad or frozen}
    _, buffers = _places(_module(worker))
    return named | {place.name: b for place in buffers if (b := place.buffer()) is not None}


def _copy_in(entry: str, target: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    """Bit-exact copy into live tensors. Nothing saved may be left over, nothing live may be left out."""
    if target.keys() != saved.keys():
        odd = sorted(target.keys() ^ saved.keys())
        raise MissingEntry(f"{entry}: the checkpoint and the model disagree on {len(odd)} tensors, first {odd[0]}")
    with torch.no_grad():
        for name, tensor in target.items():
            local = _local(tensor)
            if local.shape != saved[name].shape or local.dtype != saved[name].dtype:
                raise CheckpointError(
                    f"{entry}: {name} is {tuple(saved[name].shape)} {saved[name].dtype} in the checkpoint, "
                    f"{tuple(local.shape)} {local.dtype} in this rank"
                )
            local.copy_(saved[name])


def capture_parameters(worker: Any, frozen: bool = False) -> Captured:
    named = _saved_tensors(worker, frozen)
    shards = {name: _placement(tensor) for name, tensor in named.items()}
    return Captured({name: _local(t).detach() for name, t in named.items()}, {"shards": shards})


def restore_parameters(worker: Any, captured: Captured, frozen: bool = False) -> None:
    _copy_in("parameters", _saved_tensors(worker, frozen), captured.tensors)


def capture_all_parameters(worker: Any) -> Captured:
    """The reference model once `update_ref_every_epoch` may have moved it: nothing in it is trainable."""
    return capture_parameters(worker, frozen=True)


def restore_all_parameters(worker: Any, captured: Captured) -> None:
    restore_parameters(worker, captured, frozen=True)


def _names(worker: Any) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in _parameters(worker).items()}


def capture_optimizer(worker: Any) -> Captured:
    """Moments and step counts by `<state key>/<parameter name>`, hyperparameters of each group as JSON."""
    names = _names(worker)
    tensors, shards = {}, {}
    for parameter, state in worker.optimizer.state.items():
        for key, value in state.items():
            tensors[f"{key}/{names[parameter]}"] = _local(value).detach()
            shards[f"{key}/{names[parameter]}"] = _placement(value)
    groups = [
        {"params": [names[p] for p in group["params"]]} | {k: v for k, v in group.items() if k != "params"}
        for group in worker.optimizer.param_groups
    ]
    return Captured(tensors, {"shards": shards, "groups": groups})


def restore_optimizer(worker: Any, captured: Captured) -> None:
    """Fill a fresh optimizer, whose state has no tensors yet to copy into."""
    names = _names(worker)
    groups = worker.optimizer.param_groups
    if [group["params"] for group in captured.data["groups"]] != [[names[p] for p in g["params"]] for g in groups]:
        raise CheckpointError("optimizer: the checkpoint groups its parameters differently from this model")
    for group, saved in zip(groups, captured.data["groups"], strict=True):
        for key, value in saved.items():
            if key != "params":
                group[key] = tuple(value) if isinstance(value, list) else value
    by_name = {name: parameter for parameter, name in names.items()}
    worker.optimizer.state.clear()
    for path, tensor in captured.tensors.items():
        key, _, name = path.partition("/")
        if name not in by_name:
            raise MissingEntry(f"optimizer: {path} belongs to no parameter of this model")
        parameter = by_name[name]
        whole = captured.data["shards"][path]["shape"]
        worker.optimizer.state[parameter][key] = _like(parameter, tensor.clone(), whole)


def _like(parameter: torch.Tensor, local: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """A moment is laid out as its parameter is; a step count is a plain scalar on the CPU, as torch keeps it."""
    if not shape:
        return local
    if not isinstance(parameter, DTensor):
        return local.to(parameter.device)
    return DTensor.from_local(
        local.to(parameter.to_local().device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def capture_scheduler(worker: Any) -> Captured:
    return Captured({}, worker.scheduler.state_dict())


def restore_scheduler(worker: Any, captured: Captured) -> None:
    worker.scheduler.load_state_dict(captured.data)


def capture_rng(_owner: Any) -> Captured:
    """Streams of this process: torch on CPU and on every CUDA device, numpy, python."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64))}
    if torch.cuda.is_available():
        tensors |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    version, words, python_gauss = random.getstate()
    data = {"numpy": [kind, position, has_gauss, gauss], "python": [version, list(words), python_gauss]}
    return Captured(tensors, data)


def restore_rng(_owner: Any, captured: Captured) -> None:
    cuda = [name for name in captured.tensors if name.startswith("cuda:")]
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(cuda) != here:
        raise CheckpointError(f"rng: the checkpoint has {len(cuda)} CUDA streams, this process {here} CUDA devices")
    torch.set_rng_state(captured.tensors["torch"])
    if cuda:
        torch.cuda.set_rng_state_all([captured.tensors[f"cuda:{index}"] for index in range(here)])
    kind, position, has_gauss, gauss = captured.data["numpy"]
    np.random.set_state((kind, captured.tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, words, python_gauss = captured.data["python"]
    random.setstate((version, tuple(words), python_gauss))
