"""Sampling whose randomness is addressed by position, loaded into engines by vLLM's own `--logits-processors`.

vLLM draws the tokens of a seeded request from one generator in order, so a request that is to go on after its first
tokens can't draw what it would have drawn. Here the token at position p of a request with seed s is the argmax of
log-probabilities plus Gumbel noise, and the noise is a function of (s, p) alone: a sample of the same distribution
(Gumbel-max), whoever generated the tokens before it, wherever it is in the batch, preempted or not.

Log-probabilities that the engine reports are taken before any logits processor (vLLM's default, `raw_logprobs`).
"""

from typing import NamedTuple

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

# splitmix64, whose constants are given as torch's signed integers
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64

_ROWS = 64
"""Requests that noise is made for at once: a float64 and a few int64 of the vocabulary's size for each."""


class _Request(NamedTuple):
    seed: int
    prompt: int
    """Tokens of the prompt."""
    output: list[int]
    """Tokens drawn so far; vLLM appends to it."""
    top_k: int
    top_p: float


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Right, filling with zeros: torch has no unsigned 64-bit integers to calculate with."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer: a bijection of int64 whose output bits depend on all input bits."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Standard Gumbel noise, float64 of shape [requests, vocabulary], from int64 `seeds` and `positions` [requests]."""
    streams = _mix(_mix(seeds) + (positions + 1) * _GOLDEN)
    tokens = torch.arange(1, vocabulary + 1, dtype=torch.int64, device=seeds.device)
    bits = _shift(_mix(streams[:, None] + tokens * _GOLDEN), 12)
    uniform = (bits.double() + 0.5) * 2.0**-52  # never 0 or 1
    return -torch.log(-torch.log(uniform))


class PositionalSampling(LogitsProcessor):
    """Leaves of a request that has a seed only the token to sample, so that vLLM's own draw has no choice left.

    It comes after temperature and min-p, and does top-k and top-p itself, since vLLM's come too late.
    """

    def __init__(self, vllm_config: object, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._requests: dict[int, _Request] = {}

    def is_argmax_invariant(self) -> bool:
        """Only where tokens are drawn at random; a greedy request must keep its logits."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._requests, batch_update, _request)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        rows = sorted(self._requests)
        for start in range(0, len(rows), _ROWS):
            self._draw(logits, rows[start : start + _ROWS])
        return logits

    def _draw(self, logits: torch.Tensor, rows: list[int]) -> None:
        requests = [self._requests[row] for row in rows]
        index = self._tensor(rows)
        scores = logits[index]
        if any(request.top_k > 0 or request.top_p < 1.0 for request in requests):
            top_k = [request.top_k if request.top_k > 0 else logits.shape[1] for request in requests]
            top_p = torch.tensor([request.top_p for request in requests], dtype=scores.dtype, device=self._device)
            scores = apply_top_k_top_p_pytorch(scores, self._tensor(top_k), top_p)
        seeds = self._tensor([request.seed for request in requests])
        positions = self._tensor([request.prompt + len(request.output) for request in requests])
        drawn = (scores.double() + gumbel_noise(seeds, positions, logits.shape[1])).argmax(dim=1)
        logits[index] = float("-inf")
        logits[index, drawn] = 0.0

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _request(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> _Request | None:
    if params.seed is None or prompt is None:
        return None
    return _Request(params.seed, len(prompt), output, params.top_k, params.top_p)
