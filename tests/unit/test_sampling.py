"""The token at a position depends on seed, position and logits, and on nothing else; over seeds it is a fair sample."""

import warnings
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's imports use what torch deprecates
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    from trainer import sampling
    from trainer.sampling import PositionalSampling, gumbel_noise

VOCABULARY = 50
CPU = torch.device("cpu")


def logits(seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def processor(*requests: tuple[SamplingParams, list[int] | None, list[int]]) -> PositionalSampling:
    made = PositionalSampling(None, CPU, False)
    added: Any = [(index, *request) for index, request in enumerate(requests)]
    made.update_state(BatchUpdate(len(requests), [], added, []))
    return made


def drawn(row: torch.Tensor) -> int:
    """The token left, which must be the only one."""
    assert torch.isfinite(row).sum() == 1
    return int(row.argmax())


def draw(seed: int, prompt: int, output: int, scores: torch.Tensor, **params: Any) -> int:
    request = (SamplingParams(seed=seed, **params), [1] * prompt, [1] * output)
    return drawn(processor(request).apply(scores.clone())[0])


def test_a_request_that_goes_on_draws_what_it_would_have_drawn() -> None:
    tokens = [draw(7, 10, drawn_before, logits(drawn_before)) for drawn_before in range(30)]
    assert [draw(7, 10 + begun, 0, logits(begun)) for begun in range(30)] == tokens
    assert len(set(tokens)) > 5


def test_neither_neighbours_nor_the_place_in_the_batch_matter() -> None:
    alone = [draw(seed, 3 + seed, seed, logits(seed)) for seed in range(150)]
    together = processor(*((SamplingParams(seed=seed), [1] * (3 + seed), [1] * seed) for seed in range(150)))
    batch = torch.cat([logits(seed) for seed in range(150)])
    assert [drawn(row) for row in together.apply(batch)] == alone, "more rows than are done at once"


def test_other_seeds_and_positions_draw_other_noise() -> None:
    scores = logits()
    assert len({draw(seed, 5, 0, scores) for seed in range(100)}) > 5
    assert len({draw(1, 5, output, scores) for output in range(100)}) > 5


def test_large_seeds_and_the_ends_of_the_vocabulary() -> None:
    noise = gumbel_noise(torch.tensor([0, 2**63 - 1]), torch.tensor([0, 10**6]), 200_000)
    assert torch.isfinite(noise).all()
    assert (noise[0] != noise[1]).all()


def test_the_noise_never_changes() -> None:
    """A run that is resumed with a later version must draw the same: changing this breaks it."""
    noise = gumbel_noise(torch.tensor([1, 2**62 + 5]), torch.tensor([0, 77]), 3)
    expected = [
        [-0.0893814648357173, 4.03723791994817, -0.0778059720624584],
        [-0.6886628361105901, 1.3834854349892034, -0.024827513699902794],
    ]
    assert noise.tolist() == [pytest.approx(row, rel=1e-12) for row in expected]


def test_the_noise_is_gumbel() -> None:
    noise = gumbel_noise(torch.arange(200), torch.arange(200), 5000).reshape(-1)
    # Mean and variance of the standard Gumbel distribution; of a million draws they lie this close.
    assert noise.mean().item() == pytest.approx(0.5772157, abs=0.005)
    assert noise.var().item() == pytest.approx(1.6449341, abs=0.015)


@pytest.mark.parametrize("params", [{}, {"top_k": 6}, {"top_p": 0.7}, {"top_k": 10, "top_p": 0.9}])
def test_the_samples_are_distributed_as_vllm_s_own(params: dict[str, Any]) -> None:
    scores, count = logits(3), 20_000
    k = torch.tensor([params.get("top_k", VOCABULARY)])
    p = torch.tensor([params.get("top_p", 1.0)])
    expected = apply_top_k_top_p_pytorch(scores.clone(), k, p).softmax(-1)[0]
    requests = processor(*((SamplingParams(seed=seed, **params), [1] * 9, []) for seed in range(count)))
    rows = requests.apply(scores.repeat(count, 1)).argmax(dim=1)
    found = torch.bincount(rows, minlength=VOCABULARY) / count
    assert (found[expected == 0] == 0).all(), "what top-k and top-p exclude is never drawn"
    assert (found - expected).abs().max() < 0.015


def test_requests_without_a_seed_or_prompt_ids_are_left_alone() -> None:
    made = processor((SamplingParams(), [1], []), (SamplingParams(seed=1), None, []))
    scores = logits(rows=2)
    assert torch.equal(made.apply(scores.clone()), scores)


def test_requests_are_followed_through_the_batch() -> None:
    outputs: list[list[int]] = [[], [1], [1, 2]]
    made = processor(*((SamplingParams(seed=seed), [1, 2], outputs[seed]) for seed in range(3)))
    scores = logits(5, rows=3)
    by_seed = [draw(seed, 2, seed, scores[:1]) for seed in range(3)]
    moved: Any = [(2, 0, MoveDirectionality.UNIDIRECTIONAL)]
    made.update_state(BatchUpdate(2, [0], [], moved))
    after = made.apply(scores[:1].repeat(2, 1))
    assert [drawn(row) for row in after] == [by_seed[2], by_seed[1]]
    outputs[2].append(3)
    assert drawn(made.apply(scores[:1].repeat(2, 1))[0]) == draw(2, 2, 3, scores[:1])


def test_greedy_requests_keep_their_logits() -> None:
    assert PositionalSampling(None, CPU, False).is_argmax_invariant()
    assert sampling._ROWS < 150
