"""What a State entry is made of once captured: named tensors and JSON, nothing else."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Captured:
    """`tensors` may alias live memory: pack or digest them before training goes on. `data` is JSON-able."""

    tensors: dict[str, torch.Tensor]
    data: Any
