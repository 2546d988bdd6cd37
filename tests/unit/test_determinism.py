"""Request seeds are derived from what a request is, so that who asks when, and where, does not matter."""

from typing import Any

from trainer.determinism import environment, request_seed


def test_every_part_of_a_request_changes_its_seed() -> None:
    base: dict[str, Any] = {"run_seed": 1, "phase": "train", "step": 2, "uid": "3", "repetition": 4, "turn": 5}
    other = {"run_seed": 2, "phase": "eval", "step": 3, "uid": "4", "repetition": 5, "turn": 6}
    seeds = {request_seed(**base)} | {request_seed(**base | {key: other[key]}) for key in base}
    assert len(seeds) == len(base) + 1
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seed_is_the_same_on_every_machine() -> None:
    assert request_seed(0, "train", 1, "0", 0, 0) == 4656303615691735977


def test_each_device_has_its_own_switches_and_says_which_it_is() -> None:
    cpu, gpu = environment("cpu"), environment("gpu")
    assert cpu["HARNESS_DEVICE"] == "cpu" and gpu["HARNESS_DEVICE"] == "gpu"
    assert gpu["VLLM_BATCH_INVARIANT"] == "1" and "VLLM_BATCH_INVARIANT" not in cpu
