"""SkyRL 0.4.0's FSDP path on machines without a GPU. Every assumption of CUDA it makes is answered here, and only here.

`HARNESS_DEVICE=cpu` (from `device: cpu` in the run config) switches it on in the driver and in every rank. The GPU
profile never runs a line of it. A driver on a head node without a GPU whose ranks have GPUs is not this case.

`torch.cuda.device_count` is left alone: patched to 1, `torch.cuda.is_available()` turns true and vLLM, the optimizer
and the RNG capture all take the CUDA path.
"""

import importlib.machinery
import os
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh


def on_cpu() -> bool:
    return os.environ.get("HARNESS_DEVICE") == "cpu"


def _stand_in_for_flash_attn() -> None:
    """`model_wrapper` imports flash-attn's padding helpers at the top; transformers has the same three functions."""
    from transformers import modeling_flash_attention_utils as same

    package = types.ModuleType("flash_attn")
    padding: Any = types.ModuleType("flash_attn.bert_padding")
    padding.pad_input, padding.unpad_input = same._pad_input, same._unpad_input
    padding.index_first_axis = same._index_first_axis
    for module in (package, padding):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    package.__dict__.update(bert_padding=padding, __version__="0.0")


def _answer_cuda_calls() -> None:
    """Device questions are answered with the CPU, waiting and cache calls do nothing, memory is reported as 0 bytes."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "ipc_collect"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.mem_get_info = lambda *args, **kwargs: (0, 0)
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self


def _groups_on_gloo() -> None:
    """Process groups asked for as `cpu:gloo,cuda:nccl` and meshes asked for as `cuda`."""
    real_mesh, real_group = device_mesh.init_device_mesh, dist.init_process_group

    def mesh_on_cpu(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return real_mesh("cpu", *args, **kwargs)

    def group_on_gloo(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        real_group("gloo", *args, **kwargs)

    device_mesh.init_device_mesh = mesh_on_cpu
    distributed: Any = dist
    distributed.init_device_mesh = mesh_on_cpu
    dist.init_process_group = group_on_gloo


class _NoAutocast(torch.autocast):
    """`torch.autocast(device_type="cuda", dtype=bfloat16)` around float32 CPU code: keep float32."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu", dtype=torch.bfloat16, enabled=False)


def _sync_buffers(model: torch.nn.Module, loaded: dict[str, torch.Tensor]) -> None:
    """SkyRL's version with `device="cuda"` taken out: rank 0 broadcasts buffers that no state dict holds."""
    for module in model.modules():
        for key in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(key)
            if buffer is not None:
                source = buffer.detach() if dist.get_rank() == 0 else torch.empty(buffer.shape, dtype=buffer.dtype)
                dist.broadcast(source, src=0)
                module._buffers[key] = source


def answer_for_cuda() -> None:
    """Patch torch and SkyRL for a rank or driver without CUDA. Must run before SkyRL's worker modules are imported."""
    _stand_in_for_flash_attn()
    _answer_cuda_calls()
    _groups_on_gloo()
    torch.autocast = _NoAutocast  # type: ignore[misc]

    from torch.optim.optimizer import Optimizer

    # It asks the accelerator whether a graph is being captured; with the answers above there is no accelerator to ask.
    optimizer: Any = Optimizer
    optimizer._accelerator_graph_capture_health_check = lambda self: None

    from skyrl.backends.skyrl_train.distributed import fsdp_utils
    from skyrl.train.utils import utils

    fsdp_utils.init_device_mesh = device_mesh.init_device_mesh
    fsdp_utils._sync_non_persistent_buffers = _sync_buffers
    # Decides NCCL P2P by starting Ray and reserving two GPUs; gloo has no P2P to decide about.
    utils.peer_access_supported = lambda max_num_gpus_per_node: True


if on_cpu():
    answer_for_cuda()
