"""Everything bit-consistency needs, in one place: environment, torch switches, and the seed of each request.

Checked on CPU by `harness doctor` and the tests. The rows marked GPU are what the vendors document for the same aim;
no GPU has checked them yet (see docs/determinism.md).
"""

import hashlib
import os
import random

import numpy as np
import torch

COMMON_ENV = {
    "PYTHONHASHSEED": "0",  # set and dict-of-str iteration order must not differ between attempts
    "TOKENIZERS_PARALLELISM": "false",  # no forked tokenizer threads next to Ray and gloo
    "PYTHONDONTWRITEBYTECODE": "",  # not for bits but for time: ranks would compile what they import each time
    "HF_HUB_OFFLINE": "1",  # a run must not depend on a hub: what it loads is named by digest
}

CPU_ENV = {
    "OMP_NUM_THREADS": "1",  # reductions split over threads add up in another order
    "MKL_NUM_THREADS": "1",
    "MKL_CBWR": "COMPATIBLE",  # one code path whatever the alignment of the buffers
    "GLOO_SOCKET_IFNAME": "lo",  # single-machine profile: listen on loopback
    "TORCHDYNAMO_DISABLE": "1",  # no C++ compiler at run time, no kernels that differ with the compiler
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # keep vLLM from pinning itself to the trainer's cores
    # Logical GPUs only: without this Ray hides CUDA_VISIBLE_DEVICES and warns in every actor.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

GPU_ENV = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # GPU: cuBLAS picks kernels by free workspace unless it is fixed
    "VLLM_BATCH_INVARIANT": "1",  # GPU: kernels whose result does not depend on who else is in the batch
    "NCCL_ALGO": "Ring",  # GPU: the tuner may choose another reduction order on each start
    "NCCL_PROTO": "Simple",  # GPU
    "NCCL_NVLS_ENABLE": "0",  # GPU: in-switch reductions have their own order
    "NCCL_COLLNET_ENABLE": "0",  # GPU
}


def environment(device: str) -> dict[str, str]:
    """Environment of every process of a run, engines included. `device` is "cpu" or "gpu"."""
    return COMMON_ENV | (CPU_ENV if device == "cpu" else GPU_ENV) | {"HARNESS_DEVICE": device}


def make_torch_deterministic() -> None:
    """Switches for this process; called first thing in the driver and in every rank."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # GPU: autotuning may pick another kernel on the next start
    if os.environ.get("OMP_NUM_THREADS") == "1":
        torch.set_num_threads(1)


def seed_streams(seed: int) -> None:
    """Seed this process's torch, numpy and python streams. SkyRL seeds its ranks; nobody seeds the driver."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def request_seed(run_seed: int, phase: str, step: int, uid: str, repetition: int, turn: int) -> int:
    """The sampling seed of one generation request, 0 <= seed < 2**63: derived, so nothing about it needs saving.

    `phase` is "train" or "eval", `uid` names the prompt, `repetition` the sample within its group, `turn` the turn of a
    multi-turn trajectory. An engine that restarts, or a request that moves to another engine, draws the same tokens.
    """
    key = f"{run_seed}/{phase}/{step}/{uid}/{repetition}/{turn}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1
