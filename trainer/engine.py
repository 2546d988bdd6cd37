"""How one standalone inference server is started: SkyRL's own vLLM server, outside Ray so that it outlives a driver."""

import sys
import time
import urllib.error
import urllib.request
from typing import Any

from checkpointing.errors import WorkerLost

START_SECONDS = 600.0

# Settings that change what is computed from one start to the next, or that hide which weights served a request.
DETERMINISTIC_ARGS = {
    "enforce-eager": True,  # no graph capture: which batch sizes are captured depends on free memory
    "no-enable-prefix-caching": True,  # whether a prefix is recomputed or reused depends on who asked before
    "seed": 0,
}


def engine_command(model: str, port: int, lora_rank: int, dtype: str, device: str, args: dict[str, Any]) -> list[str]:
    """The command of a server on 127.0.0.1:`port`. `args` are vLLM's own flags without dashes, True for a switch."""
    flags: dict[str, Any] = {
        "model": model,
        "served-model-name": model,
        "dtype": dtype,
        "host": "127.0.0.1",
        "port": port,
    }
    if lora_rank:
        flags |= {"enable-lora": True, "max-lora-rank": max(8, lora_rank)}
    if device == "cpu":
        flags["worker-cls"] = "vllm.v1.worker.cpu_worker.CPUWorker"
        # A prompt read in parts makes vLLM rewind the request's generator, which a CPU generator can't.
        flags["no-enable-chunked-prefill"] = True
    flags |= DETERMINISTIC_ARGS | args
    command = [sys.executable, "-m", "skyrl.backends.skyrl_train.inference_servers.vllm_server_actor"]
    for name, value in flags.items():
        command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return command


def is_healthy(url: str) -> bool:
    """Whether the server at `url` answers its health check."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_until_healthy(urls: list[str]) -> None:
    """Block until every server answers.

    Raises:
        WorkerLost: one did not within START_SECONDS.
    """
    deadline = time.monotonic() + START_SECONDS
    for url in urls:
        while not is_healthy(url):
            if time.monotonic() > deadline:
                raise WorkerLost(f"the engine at {url} did not answer within {START_SECONDS:.0f} s")
            time.sleep(0.5)
