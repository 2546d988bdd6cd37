"""Tensors as bytes and as digests, bit for bit: NaN payloads and the sign of zero count. Nothing is pickled."""

import warnings
from typing import Annotated, Literal

import numpy as np
import torch
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json
from safetensors import TensorSpec, serialize

from checkpointing.canonical import canonical_json
from checkpointing.errors import FormatError
from checkpointing.staging import SAFETENSORS_DTYPES, Spec


def pack_tensors(tensors: dict[str, torch.Tensor]) -> bytes:
    """{name: dense tensor of any shape, dtype and device} as one safetensors file; equal tensors give equal bytes.

    Tensors may share memory (tied weights, views): each is written in full.
    """
    raw = {name: _raw(tensor) for name, tensor in tensors.items()}  # alive until `serialize` has read from it
    specs = {
        name: TensorSpec(
            dtype=_dtype(tensor), shape=tensor.shape, data_ptr=raw[name].ctypes.data, data_len=raw[name].nbytes
        )
        for name, tensor in tensors.items()
    }
    return serialize(specs)


def unpack_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """Read `pack_tensors` back, as CPU tensors that lie in `data` itself: copy before changing one.

    (The safetensors library reads from memory by copying, which is most of what a restore would then do.)

    Raises:
        FormatError: not a safetensors file.
    """
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        header = from_json(data[8:start])
        specs = {name: _Field.model_validate(field) for name, field in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError) as error:
        raise FormatError(f"not a safetensors file: {error}") from error
    end = start
    for name, field in sorted(specs.items(), key=lambda item: item[1].data_offsets):
        if (start + field.data_offsets[0], start + field.data_offsets[1]) != (end, end + field.spec.nbytes):
            raise FormatError(f"not a safetensors file: {name} is not where its {field.spec.nbytes} bytes should lie")
        end += field.spec.nbytes
    if end != len(data):
        raise FormatError(f"not a safetensors file: {len(data)} bytes, {end} expected")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that `bytes` may not be written to
        return {name: _view(data, start, field) for name, field in specs.items()}


class _Field(BaseModel):
    """What the header of a safetensors file says of one tensor."""

    model_config = ConfigDict(extra="forbid", strict=True)

    dtype: Literal[tuple(name for name, _ in SAFETENSORS_DTYPES.values())]  # type: ignore[valid-type]
    shape: list[Annotated[int, Field(ge=0)]]
    data_offsets: list[Annotated[int, Field(ge=0)]] = Field(min_length=2, max_length=2)

    @property
    def spec(self) -> Spec:
        return Spec(_TORCH_NAMES[self.dtype], tuple(self.shape))


_TORCH_NAMES = {name: torch_name for torch_name, (name, _) in SAFETENSORS_DTYPES.items()}


def _view(data: bytes, start: int, field: _Field) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, field.spec.dtype)
    if not field.spec.nbytes:
        return torch.empty(field.shape, dtype=dtype)
    offset = start + field.data_offsets[0]
    if offset % dtype.itemsize:  # a foreign writer's; ours aligns
        return torch.frombuffer(bytearray(data[offset : offset + field.spec.nbytes]), dtype=dtype).reshape(field.shape)
    count = field.spec.nbytes // dtype.itemsize
    return torch.frombuffer(data, dtype=dtype, count=count, offset=offset).reshape(field.shape)


def tensor_digest(tensor: torch.Tensor) -> str:
    """BLAKE3 over `["bfloat16",[2,3]]` (dtype and shape as canonical JSON), then the elements in row-major order."""
    header = canonical_json([_dtype(tensor), list(tensor.shape)])
    return blake3(header).update(_raw(tensor)).hexdigest()


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _raw(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The tensor's bytes, shape [nbytes]; a view of its memory where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)  # flat first: a 0-dim tensor can't be viewed as bytes
    raw: np.ndarray[tuple[int], np.dtype[np.uint8]] = flat.view(torch.uint8).numpy()
    return raw
