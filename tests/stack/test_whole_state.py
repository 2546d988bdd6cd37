"""Everything the State can hold at once: policy, critic, reference, adaptive KL, dropout; killed and left out."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaos.verdict import compare
from checkpointing.events import StateRestored, StepDone
from checkpointing.journal import Record
from harness.config import RunConfig
from harness.engines import EnginePool
from harness.processes import reap, spawn
from trainer.determinism import environment

from .conftest import REPOSITORY, Train

LAST_STEP = 4
WHOLE: dict[str, Any] = {
    "trainer.max_training_steps": LAST_STEP,
    "trainer.algorithm.advantage_estimator": "gae",
    "trainer.algorithm.use_kl_in_reward": True,
    "trainer.algorithm.kl_ctrl.type": "adaptive",
    "trainer.algorithm.kl_ctrl.horizon": 1000,
    "trainer.critic_mini_batch_size": 2,
    "trainer.policy.model.lora.dropout": 0.1,
    "trainer.policy.optimizer_config.scheduler": "linear",
    "trainer.policy.optimizer_config.num_warmup_steps": 2,
}
KILLS = ({"fault": "kill", "target": "critic:1", "at": "train.forward_backward", "step": 3},)


@pytest.fixture(scope="module")
def base(task: dict[str, Any]) -> str:
    path: str = task["skyrl"]["trainer"]["policy"]["model"]["path"]
    return path


@pytest.fixture(scope="module")
def whole_keys(base: str) -> dict[str, Any]:
    return WHOLE | {"trainer.critic.model.path": base, "trainer.ref.model.path": base}


@pytest.fixture(scope="module")
def whole(train: Train, whole_keys: dict[str, Any]) -> list[Record]:
    return train("whole", **whole_keys)


def test_every_part_moves(whole: list[Record]) -> None:
    steps = [record.event for record in whole if isinstance(record.event, StepDone)]
    for entry in ("policy/parameters", "critic/parameters", "policy/rng", "driver/kl_controller"):
        values = {step.state[entry] for step in steps}
        assert len(values) == LAST_STEP, f"{entry} does not change with each step: nothing would be shown"


def test_killed_and_resumed(whole: list[Record], train: Train, whole_keys: dict[str, Any]) -> None:
    killed = train("whole-killed", KILLS, **whole_keys)
    verdict = compare(whole, killed)
    assert verdict.outcome == "identical", verdict.reasons
    restored = [record.event.step for record in killed if isinstance(record.event, StateRestored)]
    assert restored == [2]


def leave_out(config: RunConfig, engine_urls: list[str], scratch: Path, *mode: str) -> dict[str, str | None]:
    """Run tests/stack/leave_out.py; {entry left out: what the restore said}."""
    command = [sys.executable, "-m", "tests.stack.leave_out", config.model_dump_json(), json.dumps(engine_urls)]
    env = os.environ | environment("cpu") | {"PYTHONPATH": str(REPOSITORY)}
    env |= {"HARNESS_PHASE_LISTENER": "tests.stack.leave_out:listen", "HARNESS_LEFT_OUT": str(scratch / "entry")}
    process = spawn([*command, env["HARNESS_LEFT_OUT"], *mode], env, scratch / "log", scratch / "sessions")
    try:
        process.wait(timeout=600)
    finally:
        reap(scratch / "sessions")
    log = (scratch / "log").read_text(errors="replace")
    results = [line.removeprefix("RESULT ") for line in log.splitlines() if line.startswith("RESULT ")]
    assert results, log[-3000:]
    said: dict[str, str | None] = json.loads(results[-1])
    return said


def test_each_entry_left_out_of_the_restore_is_named(
    whole: list[Record],
    configure: Callable[..., RunConfig],
    engines: EnginePool,
    whole_keys: dict[str, Any],
    tmp_path: Path,
) -> None:
    config = configure("whole-left-out", **whole_keys)
    shutil.copytree(configure("whole").run_dir, config.run_dir)
    for newest in (config.run_dir / "store" / "commits").glob(f"{LAST_STEP:010d}-*"):
        newest.unlink()  # so that there is something left to resume for
    said = leave_out(config, engines.urls, tmp_path)
    assert said.pop("nothing") is None, "a complete restore must succeed"
    assert len(said) == 15
    # These two are JSON null or empty in this run, fresh or not; test_driver_rules.py gives them something to hold.
    empty = {"driver/dynamic_sampling", "driver/callbacks"}
    # Nothing is loaded for this one: it holds the attempt's own base models against the checkpoint's.
    compared_only = {"driver/frozen_models"}
    # The critic trains without dropout, so nothing in its ranks draws: the stream of a fresh one is the saved one.
    never_drawn = {"critic/rng"}
    # The driver draws nothing either, but a fresh driver is seeded later than it would be restored.
    for entry, message in said.items():
        if entry not in empty | compared_only | never_drawn:
            assert message is not None and f"Error: {entry}:" in message, f"{entry} left out, restore said {message}"


def test_a_reference_that_has_moved_comes_back(
    configure: Callable[..., RunConfig], engines: EnginePool, base: str, tmp_path: Path
) -> None:
    """Full fine-tuning, since SkyRL can't move a reference with LoRA; no engine is asked for anything."""
    start = tmp_path / "reference"
    shutil.copytree(base, start)
    weights = start / "model.safetensors"
    from safetensors.torch import load_file, save_file

    save_file({name: tensor * 1.5 for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    keys = {
        "trainer.policy.model.lora.rank": 0,
        "trainer.ref.model.path": str(start),
        "trainer.algorithm.use_kl_loss": True,
        "trainer.update_ref_every_epoch": True,
    }
    config = configure("moved-reference", **keys)
    assert leave_out(config, ["http://127.0.0.1:1"], tmp_path, "move-reference") == {"committed": None}
    said = leave_out(config, ["http://127.0.0.1:1"], tmp_path)
    assert said["nothing"] is None
    assert said["ref/parameters"] is not None and "Error: ref/parameters:" in said["ref/parameters"]


def test_killed_while_dynamic_sampling_fills_its_buffer(train: Train) -> None:
    """Steps take more batches than one, so that step and data position go apart; the kill is in mid-buffer."""
    keys = {
        "trainer.placement.policy_num_gpus_per_node": 1,  # the buffer is the driver's
        "trainer.algorithm.dynamic_sampling.type": "filter",
        "trainer.algorithm.dynamic_sampling.max_sample_batches": 10,
        "trainer.max_training_steps": 4,
        "generator.n_samples_per_prompt": 2,
        "trainer.micro_train_batch_size_per_gpu": 2,
        "trainer.micro_forward_batch_size_per_gpu": 2,
    }
    whole = train("dynamic", **keys)
    positions = [record.event.state["driver/data_position"] for record in whole if isinstance(record.event, StepDone)]
    assert len(set(positions)) == len(positions) >= 3
    kill = {"fault": "kill", "target": "driver", "at": "generate.begin", "step": 3, "nth": 2}
    killed = train("dynamic-killed", (kill,), **keys | {"data.dataloader.num_workers": 2})
    verdict = compare(whole, killed)
    assert verdict.outcome == "identical", verdict.reasons
