"""`harness doctor`: measure, on the machine at hand, what the harness may promise there.

Nothing is assumed from the kind of machine: the engine is asked the same things twice, alone and in company, and two
short training runs are compared.
"""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from rich.console import Console

from chaos.verdict import Verdict, compare
from checkpointing.errors import VERIFY_CANNOT_TELL, ConfigError
from harness.commands import prepare, read_run, run_to_end
from harness.config import RunConfig, flatten, load_config
from harness.engines import EnginePool
from trainer.engine import wait_until_healthy

REQUESTS = 16
NEW_TOKENS = 24
TRAINING_STEPS = 3


class Generation(NamedTuple):
    """Token ids and the log-probability of each, as the engine reports them."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class Engine:
    """One engine, asked directly."""

    def __init__(self, url: str, model: str, http: httpx.Client) -> None:
        self.url, self.model, self.http = url, model, http

    def _post(self, token_ids: Sequence[int], sampling: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self.model, "token_ids": list(token_ids), "sampling_params": sampling}
        answer = self.http.post(f"{self.url}/inference/v1/generate", json=body)
        answer.raise_for_status()
        result: dict[str, Any] = answer.json()
        return result

    def generate(self, prompt: Sequence[int], seed: int) -> Generation:
        sampling = {"temperature": 1.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "seed": seed, "logprobs": 1}
        choice = self._post(prompt, sampling)["choices"][0]
        logprobs = tuple(float(item["logprob"]) for item in choice["logprobs"]["content"])
        return Generation(tuple(choice["token_ids"]), logprobs)

    def score(self, prompt: Sequence[int], generated: Sequence[int]) -> tuple[float, ...]:
        """Log-probabilities of `generated` when it is read as part of the prompt (prefill), not drawn (decode)."""
        answer = self._post([*prompt, *generated], {"max_tokens": 1, "prompt_logprobs": 1})
        rows = answer["prompt_logprobs"][len(prompt) :]
        return tuple(float(row[str(token)]["logprob"]) for row, token in zip(rows, generated, strict=True))


def _prompts(vocabulary: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocabulary, size=int(rng.integers(8, 48))).tolist() for _ in range(REQUESTS)]


def examine_engine(url: str, model: str) -> dict[str, bool]:
    """{property: whether it held} for the engine at `url`, over REQUESTS prompts of different lengths."""
    vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    prompts = _prompts(vocabulary)
    with httpx.Client(timeout=300) as http, ThreadPoolExecutor(REQUESTS) as pool:
        engine = Engine(url, model, http)
        alone = [engine.generate(prompt, seed) for seed, prompt in enumerate(prompts)]
        again = [engine.generate(prompt, seed) for seed, prompt in enumerate(prompts)]
        together = list(pool.map(engine.generate, prompts, range(REQUESTS)))
        prefill = [engine.score(prompt, drawn.tokens) for prompt, drawn in zip(prompts, alone, strict=True)]
    return {
        "repeatable: the same request twice": alone == again,
        f"independent of the batch: alone and among {REQUESTS}": alone == together,
        "prefill equals decode": prefill == [drawn.logprobs for drawn in alone],
    }


def _two_short_runs(config: RunConfig, engines: EnginePool, console: Console) -> Verdict:
    skyrl = flatten(config.skyrl) | {"trainer.max_training_steps": TRAINING_STEPS, "trainer.eval_interval": -1}
    directory = config.run_dir / time.strftime("doctor-%Y%m%d-%H%M%S")
    journals = []
    for name in ("first", "second"):
        short = config.model_copy(update={"run_dir": directory / name, "skyrl": skyrl})
        run_to_end(short, console, name, engines)
        journals.append(read_run(short.run_dir))
    return compare(*journals)


def examine(path: Path, console: Console) -> int:
    """Returns 0 if a resumed run can be promised to be bit-identical here, else VERIFY_CANNOT_TELL."""
    config = load_config(path, RunConfig)
    if config.engines is None:
        raise ConfigError(f"{path}: the doctor starts the engines itself; add an `engines:` section")
    prepare(config, console)
    with EnginePool(config, config.run_dir / "doctor-logs") as engines:
        engines.start_missing()
        wait_until_healthy(engines.urls)
        findings = examine_engine(engines.urls[0], flatten(config.skyrl)["trainer.policy.model.path"])
        verdict = _two_short_runs(config, engines, console)
    findings[f"two runs of {verdict.steps_compared} steps agree"] = verdict.outcome == "identical"
    for what, held in findings.items():
        console.print(f"{'yes' if held else 'NO ':>4}  {what}")
    for reason in verdict.reasons:
        console.print(f"      {reason}")
    repeatable, independent, prefill, agree = findings.values()
    promised = repeatable and independent and agree
    console.print(
        "A resumed run can be bit-identical here."
        if promised
        else "Bit-identical resume can't be promised here: a difference need not be the harness's fault."
    )
    console.print(
        "Unfinished generations can go on after their last tokens: set engines.continuation."
        if promised and prefill
        else "Unfinished generations can NOT go on after their last tokens: leave engines.continuation off."
    )
    return 0 if promised else VERIFY_CANNOT_TELL
