"""Tensors as bytes and as digests, bit for bit: NaN payloads and the sign of zero count. Nothing is pickled."""

import numpy as np
import safetensors.torch
import torch
from blake3 import blake3
from safetensors import SafetensorError, TensorSpec, serialize

from checkpointing.canonical import canonical_json
from checkpointing.errors import FormatError


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
    """Read `pack_tensors` back, as CPU tensors.

    Raises:
        FormatError: not a safetensors file.
    """
    try:
        return safetensors.torch.load(data)
    except SafetensorError as error:
        raise FormatError(f"not a safetensors file: {error}") from error


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
