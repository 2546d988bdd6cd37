"""The copy for which training stands still: captured entries into a host buffer that is there already."""

from collections.abc import Sequence
from typing import Any

import torch

from checkpointing.canonical import canonical_json
from checkpointing.staging import Image, Spec, Staged, StagedShard, StagingBuffer, image_of
from trainer.captured import Captured
from trainer.state import Entry

_CACHE_LINE = 64


def stage_entries(entries: Sequence[Entry], owner: Any, buffer: StagingBuffer, rank: int, step: int) -> Staged:
    """Capture this owner's entries and copy them into `buffer`. When it returns the owner may go on.

    Whatever was staged before is overwritten: it must have been written by then.
    """
    captured = {entry.name: entry.capture(owner) for entry in entries}
    specs = {name: {key: _spec(tensor) for key, tensor in part.tensors.items()} for name, part in captured.items()}
    images = {name: image_of(parts) if parts else Image(b"", 0, {}) for name, parts in specs.items()}
    offsets, end = {}, 0
    for name, image in images.items():
        # So that its tensors begin at cache lines: a copy to anywhere else is slower.
        offsets[name] = end + -(end + len(image.header)) % _CACHE_LINE
        end = offsets[name] + image.nbytes
    memory = buffer.reserve(end)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    for name, image in images.items():
        memory[offsets[name] : offsets[name] + len(image.header)] = image.header
        _copy(captured[name], specs[name], {key: offsets[name] + start for key, start in image.offsets.items()}, whole)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    shards = [
        StagedShard(
            entry=name,
            offset=offsets[name],
            nbytes=image.nbytes,
            tensors={key: (offsets[name] + start, specs[name][key]) for key, start in image.offsets.items()},
            data=canonical_json(captured[name].data),
        )
        for name, image in images.items()
    ]
    return Staged(entries[0].owner, rank, step, buffer.path, end, shards)


def _spec(tensor: torch.Tensor) -> Spec:
    return Spec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _copy(captured: Captured, specs: dict[str, Spec], offsets: dict[str, int], whole: torch.Tensor) -> None:
    for name, tensor in captured.tensors.items():
        if tensor.numel():
            place = whole[offsets[name] : offsets[name] + specs[name].nbytes]
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach(), non_blocking=True)
