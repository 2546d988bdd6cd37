"""The same trainer for people who already run SkyRL: their own command line, one argument more."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from checkpointing.events import AttemptStarted, RunFinished, StepDone
from checkpointing.journal import Record, read_journal
from harness.config import RunConfig, flatten
from harness.engines import EnginePool
from harness.processes import reap, spawn
from trainer.engine import wait_until_healthy

from .conftest import REPOSITORY


def steps(records: list[Record]) -> dict[int, tuple[dict[str, str], dict[str, str]]]:
    return {r.event.step: (r.event.state, r.event.data) for r in records if isinstance(r.event, StepDone)}


def test_their_command_resumes_by_being_started_again(
    baseline: list[Record], configure: Callable[..., RunConfig], engines: EnginePool, tmp_path: Path
) -> None:
    engines.start_missing()
    wait_until_healthy(engines.urls)
    config = configure("plugin", **{"trainer.max_training_steps": 3})
    keys = flatten(config.skyrl) | {
        "trainer.override_entrypoint": "trainer.entrypoint",
        "trainer.ckpt_path": str(config.run_dir),
        "trainer.export_path": str(config.run_dir / "export"),
        "trainer.log_path": str(config.run_dir / "logs"),
        "trainer.policy.model.lora.lora_sync_path": str(config.run_dir / "adapter"),
        "generator.inference_engine.run_engines_locally": False,
        "generator.inference_engine.external_server_urls": engines.urls,
        "generator.inference_engine.external_proxy_url": engines.urls[0],
    }
    arguments = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in keys.items()]
    command = [sys.executable, "-m", "skyrl.train.entrypoints.main_base", *arguments]
    env = os.environ | {
        "HARNESS_DEVICE": "cpu",
        "HARNESS_ENVIRONMENTS": "maze=trainer.maze.env:MazeEnv",
        "PYTHONPATH": str(REPOSITORY),
    }
    plan = tmp_path / "plan.json"
    plan.write_text('{"faults": [{"fault": "kill", "target": "driver", "at": "save.before_commit", "step": 2}]}')
    killed = env | {"HARNESS_PHASE_LISTENER": "chaos.agent:listen", "HARNESS_FAULT_PLAN": str(plan)}
    codes = []
    for environment in (killed, env, env):
        process = spawn(command, environment, tmp_path / "log", tmp_path / "sessions")
        try:
            codes.append(process.wait(timeout=600))
        finally:
            reap(tmp_path / "sessions")
    assert codes == [-9, 0, 0], (tmp_path / "log").read_text(errors="replace")[-3000:]
    records = read_journal(config.run_dir)
    assert [r.event.resumed_from for r in records if isinstance(r.event, AttemptStarted)] == [None, 1, 3]
    assert any(isinstance(record.event, RunFinished) for record in records)
    whole = steps(baseline)
    assert steps(records) == {step: whole[step] for step in (1, 2, 3)}


def test_nothing_of_a_run_is_left_behind(baseline: list[Record], configure: Callable[..., RunConfig]) -> None:
    assert baseline
    directory = configure("baseline").run_dir
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(directory) not in listed
    assert not (directory / "logs" / "driver.sessions").exists()
