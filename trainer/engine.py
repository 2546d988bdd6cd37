"""How one standalone inference server is started: SkyRL's own vLLM server, outside Ray so that it outlives a driver."""

import json
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from checkpointing.errors import WorkerLost

START_SECONDS = 600.0
GENERATE_SECONDS = 60.0

# Settings that change what is computed from one start to the next, or that hide which weights served a request.
DETERMINISTIC_ARGS = {
    "enforce-eager": True,  # no graph capture: which batch sizes are captured depends on free memory
    "no-enable-prefix-caching": True,  # whether a prefix is recomputed or reused depends on who asked before
    "seed": 0,
}


def engine_command(
    model: str, port: int, lora_rank: int, dtype: str, device: str, args: dict[str, Any], continuation: bool = False
) -> list[str]:
    """The command of a server on 127.0.0.1:`port`. `args` are vLLM's own flags without dashes, True for a switch.

    With `continuation` it samples by position (sampling.py).
    """
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
    if continuation:
        flags["logits-processors"] = "trainer.sampling:PositionalSampling"
    flags |= DETERMINISTIC_ARGS | args
    command = [sys.executable, "-m", "skyrl.backends.skyrl_train.inference_servers.vllm_server_actor"]
    for name, value in flags.items():
        command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return command


def is_healthy(url: str, seconds: float = 5.0) -> bool:
    """Whether the server at `url` answers its health check within `seconds`."""
    return _answers(f"{url}/health", seconds)


def can_generate(url: str, model: str) -> bool:
    """Whether it also generates: a server whose core hangs is healthy by its own word."""
    body = json.dumps({"model": model, "prompt": [1], "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    return _answers(request, GENERATE_SECONDS)


def _answers(request: str | urllib.request.Request, seconds: float) -> bool:
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
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
