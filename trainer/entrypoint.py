"""The harness for people who already run SkyRL: add `trainer.override_entrypoint=trainer.entrypoint` to the command.

The run directory is `trainer.ckpt_path`, saves follow `trainer.ckpt_interval`, and starting the same command again
resumes. Environments that the command's own entrypoint registered are named in HARNESS_ENVIRONMENTS as
`id=module:Class`, separated by commas. HARNESS_CHECKPOINTS says in JSON what `checkpoints:` says in a run config.
"""

import os
import sys
from pathlib import Path

from checkpointing.settings import Checkpoints
from trainer.determinism import environment
from trainer.ending import end_process
from trainer.own_cluster import own_cluster


def main() -> None:
    """Called by SkyRL's `main_base`; starts over in a process whose environment is right from its first instruction.

    Ends the process: 0, or the exit code of the error (see checkpointing/errors.py).
    """
    device = os.environ.get("HARNESS_DEVICE", "gpu")
    command = [sys.executable, "-m", "trainer.entrypoint", *sys.argv[1:]]
    access = own_cluster() if _ray_address() == "local" else {}
    os.execve(sys.executable, command, os.environ | environment(device) | access)


def _ray_address() -> str:
    return os.environ.get("RAY_ADDRESS", "local")


def _run() -> None:
    from trainer.experiment import run_experiment
    from trainer.setup import Setup
    from trainer.skyrl_config import skyrl_config

    cfg = skyrl_config([arg for arg in sys.argv[1:] if not arg.startswith("trainer.override_entrypoint=")])
    named = [pair.partition("=") for pair in os.environ.get("HARNESS_ENVIRONMENTS", "").split(",") if pair]
    setup = Setup(
        directory=Path(cfg.trainer.ckpt_path),
        device=os.environ["HARNESS_DEVICE"],
        checkpoints=Checkpoints.from_environment(),
        ray_address=_ray_address(),
        envs={name: entry_point for name, _, entry_point in named},
    )
    run_experiment(cfg, setup)


if __name__ == "__main__":
    end_process(_run)
