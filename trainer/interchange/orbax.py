"""A whole checkpoint as an Orbax checkpoint, bit for bit, for programs that live in JAX.

It has two items. `state`: {entry: {tensor: array}}, gathered where ranks hold pieces of a whole, and {entry: {rank:
{tensor: array}}} where each rank has its own (RNG streams). `metadata`: step, topology, and each entry's JSON parts in
rank order, without `shards`, which the gathering used up. Read it with::

    ocp.Checkpointer(ocp.CompositeCheckpointHandler()).restore(
        out, args=ocp.args.Composite(state=ocp.args.PyTreeRestore(), metadata=ocp.args.JsonRestore())
    )
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpointing.manifest import Manifest
from checkpointing.store import Store
from trainer.captured import Captured
from trainer.interchange.whole import gather, is_sharded, new_folder, read_shards


def export_orbax(store: Store, manifest: Manifest, out: Path) -> None:
    """Write every entry of the State to the new folder `out`, which appears whole or not at all.

    Raises:
        CheckpointError: `out` exists, or shards don't add up.
        CorruptBlob: a blob is missing or damaged.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed: don't take a GPU
    import orbax.checkpoint as ocp

    state, data = {}, {}
    for name, entry in manifest.entries.items():
        saved = read_shards(store, entry)
        data[name] = [_metadata(rank) for rank in saved]
        if tensors := _tree(name, saved):
            state[name] = tensors
    metadata = {"step": manifest.step, "topology": manifest.topology, "entries": data}
    with new_folder(out) as folder, ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(
            folder.resolve(),
            args=ocp.args.Composite(state=ocp.args.PyTreeSave(state), metadata=ocp.args.JsonSave(metadata)),
            force=True,  # the folder is ours, empty and hidden
        )


def _tree(name: str, saved: list[Captured]) -> dict[str, Any]:
    if is_sharded(saved):
        return {tensor: _array(value) for tensor, value in gather(name, saved).items()}
    ranks = [{tensor: _array(value) for tensor, value in captured.tensors.items()} for captured in saved]
    return {str(rank): arrays for rank, arrays in enumerate(ranks) if arrays}


def _metadata(captured: Captured) -> Any:
    if not isinstance(captured.data, dict):
        return captured.data
    return {key: value for key, value in captured.data.items() if key != "shards"}


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor's own memory as a numpy array; numpy has the dtypes it lacks from ml_dtypes."""
    import ml_dtypes

    if tensor.dtype is torch.bfloat16 or (tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1):
        same: Any = getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch."))
        bits = torch.int16 if tensor.dtype is torch.bfloat16 else torch.uint8
        return tensor.view(bits).numpy().view(same)
    return tensor.numpy()
