"""A checkpoint directory that stock SkyRL 0.4.0 saved (FSDP strategy), as what our ranks would have captured.

`global_step_N/{policy,critic}/` holds per rank `model_`, `optim_` and `extra_state_world_size_W_rank_R.pt`, pickles all
of them. They are read by torch's weights-only unpickler, which knows a closed list of types and calls nothing else.

What becomes what:
- parameters by their own names (`base_model.model...` with LoRA): FSDP shards every parameter and no buffer, so what is
  a DTensor is a parameter. With LoRA only those with `lora_` in their names: the frozen base is not copied
- optimizer state, numbered in the file, by the name of the parameter with that number
- LR scheduler and each rank's RNG streams as they are; the one CUDA stream saved is that of a rank's only device
- the data position is derived from N: SkyRL's loader state (`data.pt`, never opened) belongs to a shuffled order that
  ours is not. An epoch under way goes on in our order: it may repeat prompts of this epoch, and leave others out

Not saved by SkyRL, so not imported: KL controller, driver RNG, dynamic-sampling buffer, a moved reference model. They
start as in a new run.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor  # importing it is also what makes DTensors known to the unpickler
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from checkpointing.errors import CheckpointError, ConfigError, MissingEntry, TopologyMismatch
from trainer.captured import Captured

# numpy's stream is an array of uint32; its rebuilding function is called by its old name in files of numpy 1.
NUMPY_STREAM: list[Any] = [
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    (np._core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),  # type: ignore[attr-defined]
    np.ndarray,
    np.dtype,
    np.dtypes.UInt32DType,
]


@dataclass(frozen=True)
class Imported:
    """`entries` is {entry name: what each rank would have captured}; `config` is SkyRL's, as nested dicts."""

    step: int
    entries: dict[str, list[Captured]]
    config: dict[str, Any]


def import_stock(directory: Path, prompts: int) -> Imported:
    """Read `directory` (`.../global_step_N`). Nothing in it is executed.

    Args:
        directory: what stock SkyRL saved.
        prompts: in the dataset that the new run trains on, after SkyRL's length filter.

    Raises:
        ConfigError: SkyRL's fully asynchronous trainer has saved it.
        CheckpointError: a file holds anything but tensors and plain values, or files contradict each other.
        MissingEntry: a file is missing.
        TopologyMismatch: the files of some ranks are missing.
    """
    if (directory / "fully_async_state.pt").exists():
        raise ConfigError(f"{directory}: saved by the fully asynchronous trainer, which is not supported yet")
    state = _load(directory / "trainer_state.pt")
    with _expected(f"{directory}/trainer_state.pt"):
        step, config = state["global_step"], state["config"]
        position = _position(step, prompts, config["trainer"])
    if directory.name.startswith("global_step_") and directory.name != f"global_step_{step}":
        raise CheckpointError(f"{directory}: holds the state of step {step}; one of the two is wrong")
    entries = _role("policy", directory / "policy")
    if (directory / "critic").is_dir():
        entries |= _role("critic", directory / "critic")
    driver = {
        "global_step": {"global_step": step},
        "data_position": position,
        "dynamic_sampling": None,
    }
    return Imported(step, entries | {f"driver/{name}": [Captured({}, data)] for name, data in driver.items()}, config)


def _position(step: int, prompts: int, trainer: dict[str, Any]) -> dict[str, int]:
    """`EpochLoader.position` after `step` batches."""
    if trainer["algorithm"]["dynamic_sampling"]["type"] == "filter":
        raise CheckpointError("with dynamic sampling by filter the step does not tell how much data was used")
    batch_size = trainer["train_batch_size"]
    batches = prompts // batch_size
    if not batches:
        raise CheckpointError(f"the dataset has {prompts} prompts, less than one batch of {batch_size}")
    epoch, batch = divmod(step - 1, batches) if step else (0, -1)
    return {"epoch": epoch, "batch": batch + 1, "batch_size": batch_size, "size": prompts}


def _role(role: str, folder: Path) -> dict[str, list[Captured]]:
    found = [re.fullmatch(r"model_world_size_(\d+)_rank_(\d+)\.pt", file.name) for file in folder.glob("model_*.pt")]
    ranks = sorted((int(match[1]), int(match[2])) for match in found if match)
    if not ranks:
        raise MissingEntry(f"{folder}: no model_world_size_W_rank_R.pt; only SkyRL's FSDP checkpoints can be imported")
    world_size = ranks[0][0]
    if ranks != [(world_size, rank) for rank in range(world_size)]:
        raise TopologyMismatch(f"{folder}: needs one model file from each of {world_size} ranks, it has {len(ranks)}")
    entries: dict[str, list[Captured]] = {}
    for rank in range(world_size):
        for name, captured in _rank(folder, world_size, rank).items():
            entries.setdefault(f"{role}/{name}", []).append(captured)
    return entries


def _rank(folder: Path, world_size: int, rank: int) -> dict[str, Captured]:
    suffix = f"world_size_{world_size}_rank_{rank}.pt"
    model, optimizer, extra = (_load(folder / f"{kind}_{suffix}") for kind in ("model", "optim", "extra_state"))
    with _expected(f"{folder}: rank {rank} of {world_size}"):
        if (extra["world_size"], extra["rank"]) != (world_size, rank):
            raise CheckpointError(f"{folder}/extra_state_{suffix}: is of rank {extra['rank']} of {extra['world_size']}")
        return {
            "parameters": _parameters(model),
            "optimizer": _optimizer(optimizer, [name for name, value in model.items() if isinstance(value, DTensor)]),
            "lr_scheduler": Captured({}, extra["lr_scheduler"]),
            "rng": _rng(extra["rng"]),
        }


@contextmanager
def _expected(where: str) -> Iterator[None]:
    """Values of another form than SkyRL's become a CheckpointError that names `where`."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where}: not what SkyRL saves: {error!r}") from error


def _parameters(model: dict[str, torch.Tensor]) -> Captured:
    adapter = any("lora_" in name for name in model)
    kept = {n: t for n, t in model.items() if not adapter or "lora_" in n or not isinstance(t, DTensor)}
    return _pieces(kept, {})


def _optimizer(saved: dict[str, Any], names: list[str]) -> Captured:
    if sorted(index for group in saved["param_groups"] for index in group["params"]) != list(range(len(names))):
        raise CheckpointError("optimizer: it has other parameters than the model (tied weights can't be imported)")
    groups = [group | {"params": [names[index] for index in group["params"]]} for group in saved["param_groups"]]
    state = {f"{key}/{names[i]}": value for i, states in saved["state"].items() for key, value in states.items()}
    return _pieces(state, {"groups": groups})


def _pieces(tensors: dict[str, torch.Tensor], data: dict[str, Any]) -> Captured:
    """Local tensors, and in `data["shards"]` where they lie, as `rank_state` has it."""
    local, shards = {}, {}
    for name, tensor in tensors.items():
        local[name], offset = tensor.detach(), [0] * tensor.ndim
        if isinstance(tensor, DTensor):
            local[name] = tensor.to_local().detach()
            shape, where = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            if local[name].shape != torch.Size(shape):
                raise CheckpointError(f"{name}: is {tuple(local[name].shape)}, {tuple(shape)} by its placement")
            offset = list(where)
        shards[name] = {"shape": list(tensor.shape), "offset": offset}
    return Captured(local, data | {"shards": shards})


def _rng(saved: dict[str, Any]) -> Captured:
    """As `rank_state.capture_rng`."""
    kind, keys, position, has_gauss, gauss = saved["numpy"]
    tensors = {"torch": saved["cpu"], "numpy": torch.from_numpy(keys.astype(np.int64))}
    if "cuda" in saved:
        tensors["cuda:0"] = saved["cuda"]
    version, words, python_gauss = saved["random"]
    data = {"numpy": [kind, position, has_gauss, gauss], "python": [version, list(words), python_gauss]}
    return Captured(tensors, data)


def _load(path: Path) -> Any:
    """What SkyRL saved in `path`, on the CPU. Raises MissingEntry or CheckpointError."""
    if not path.is_file():
        raise MissingEntry(f"{path}: missing, so this is not a whole checkpoint of stock SkyRL")
    try:
        with torch.serialization.safe_globals(NUMPY_STREAM), _without_mesh_warning():
            # The one place that reads a pickle: the closed list of types above is all that it can make.
            # Mapped, as the ranks' files together may be larger than this machine's memory.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # noqa: TID251
    except Exception as error:  # whatever a foreign file may raise
        raise CheckpointError(f"{path}: refused, it is damaged or holds more than tensors: {error}") from error


@contextmanager
def _without_mesh_warning() -> Iterator[None]:
    """torch warns that the ranks' process groups are not here. On purpose: nothing is computed on the mesh."""
    log = logging.getLogger("torch.distributed.device_mesh")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
