"""The process of one attempt: how it is started, where it leaves its log, and why it ended."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

from chaos.plan import FaultPlan
from checkpointing.progress import progress_path
from checkpointing.trace import TRACE_VARIABLE, trace_folder
from harness.config import RunConfig
from harness.processes import spawn
from trainer.determinism import environment
from trainer.own_cluster import own_cluster

HEAD_SECONDS = 20
"""After so long without its head Ray ends a driver and its ranks, where the head is ours; else after its own 60. Not
within the time of grace: a signal to everybody ends the head at once, and the driver has something to save yet."""

LISTENER = "chaos.agent:listen"
"""What hears the phases of a run that is to meet faults."""


def start_driver(
    config: RunConfig, engine_urls: list[str], attempt: int, faults: Path | None, unusable: dict[str, str]
) -> subprocess.Popen[bytes]:
    """`unusable`: {commit that is not to be resumed from: why}."""
    env = os.environ | environment(config.device) | {"HARNESS_ATTEMPT": str(attempt)}
    env |= {"HARNESS_PROGRESS": str(progress_path(config.run_dir, attempt).resolve())}
    env |= {"HARNESS_UNUSABLE": json.dumps(unusable)}
    if config.ray_address == "local":
        env |= own_cluster()
        seconds = math.ceil(max(HEAD_SECONDS, config.supervision.grace_seconds))
        env.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(seconds))
    if faults is not None:
        env |= {"HARNESS_PHASE_LISTENER": LISTENER, "HARNESS_FAULT_PLAN": str(faults.resolve())}
        env[TRACE_VARIABLE] = str(trace_folder(config.run_dir).resolve())
        env["HARNESS_FAULTS_PLANNED"] = str(len(FaultPlan.load(faults).faults))
    command = [sys.executable, "-m", "harness.driver", config.model_dump_json(), json.dumps(engine_urls)]
    return spawn(command, env, log_path(config, attempt), ledger(config))


def log_path(config: RunConfig, attempt: int) -> Path:
    return config.run_dir / "logs" / f"attempt-{attempt:06d}.log"


def ledger(config: RunConfig) -> Path:
    return config.run_dir / "logs" / "driver.sessions"


def why_ended(code: int, words: str, silent: bool) -> str:
    """A driver ended by itself with `code` (or minus a signal) after `words`."""
    if silent:
        return f"ended with {code} and said nothing: Ray ends a driver that has lost its head"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return "complete" if code == 0 else words
