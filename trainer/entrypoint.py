"""The harness for people who already run SkyRL: add `trainer.override_entrypoint=trainer.entrypoint` to the command.

The run directory is `trainer.ckpt_path`, saves follow `trainer.ckpt_interval`, and starting the same command again
resumes. Environments that the command's own entrypoint registered are named in HARNESS_ENVIRONMENTS as
`id=module:Class`, separated by commas.
"""

import os
import sys
from pathlib import Path

from checkpointing.errors import HarnessError
from trainer.determinism import environment


def main() -> None:
    """Called by SkyRL's `main_base`; starts over in a process whose environment is right from its first instruction.

    Ends the process: 0, or the exit code of the error (see checkpointing/errors.py).
    """
    device = os.environ.get("HARNESS_DEVICE", "gpu")
    command = [sys.executable, "-m", "trainer.entrypoint", *sys.argv[1:]]
    os.execve(sys.executable, command, os.environ | environment(device))


def _run() -> int:
    from trainer.experiment import run_experiment
    from trainer.skyrl_config import skyrl_config

    try:
        cfg = skyrl_config([arg for arg in sys.argv[1:] if not arg.startswith("trainer.override_entrypoint=")])
        named = [pair.partition("=") for pair in os.environ.get("HARNESS_ENVIRONMENTS", "").split(",") if pair]
        environments = {name: entry_point for name, _, entry_point in named}
        address = os.environ.get("RAY_ADDRESS", "local")
        run_experiment(cfg, Path(cfg.trainer.ckpt_path), address, os.environ["HARNESS_DEVICE"], environments)
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = _run()
    sys.stdout.flush()
    # SkyRL's client and Ray keep threads that hold the interpreter open after training is done.
    os._exit(code)
