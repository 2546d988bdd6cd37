"""A driver that restores one checkpoint many times, each time leaving another State entry out, on real ranks.

    python -m tests.stack.leave_out RUN_CONFIG_JSON ENGINE_URLS_JSON LEFT_OUT_FILE [move-reference]

With `move-reference` it moves the reference model to the policy, as SkyRL does at the end of an epoch, and commits.
`LEFT_OUT_FILE` names the entry being left out; every process of the run looks there (HARNESS_LEFT_OUT). Leaving
out means that the owner keeps what a fresh process holds. Prints one JSON object: {entry: what restore said, or null}.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from checkpointing.errors import HarnessError


def listen(phase: str, where: dict[str, Any]) -> None:
    """Named by HARNESS_PHASE_LISTENER: replaces this process's restore functions as soon as it says who it is."""
    if phase not in ("driver.started", "worker.started"):
        return
    from dataclasses import replace

    from trainer import state

    state.STATE[:] = [replace(entry, restore=_Forgetful(entry)) for entry in state.STATE]


class _Forgetful:
    """Restores an entry, except where it is the one to leave out: then it brings a fresh process's state back."""

    def __init__(self, entry: Any) -> None:
        self.entry = entry
        self.fresh: Any = None

    def __call__(self, owner: Any, captured: Any) -> None:
        from trainer.captured import Captured

        if self.fresh is None:
            held = self.entry.capture(owner)
            data = json.loads(json.dumps(held.data))
            self.fresh = Captured({name: tensor.clone() for name, tensor in held.tensors.items()}, data)
        left_out = Path(os.environ["HARNESS_LEFT_OUT"]).read_text() == self.entry.name
        self.entry.restore(owner, self.fresh if left_out else captured)


def main() -> None:
    from skyrl.backends.skyrl_train.utils.ppo_utils import get_kl_controller

    from checkpointing.phases import reached
    from harness.config import RunConfig
    from trainer.checkpoint import restore, restore_late
    from trainer.experiment import ResumableExperiment
    from trainer.setup import Setup
    from trainer.skyrl_config import skyrl_config
    from trainer.state import STATE

    config, urls, left_out = RunConfig.model_validate_json(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    left_out.write_text("nothing")
    os.environ["HARNESS_LEFT_OUT"] = str(left_out)
    cfg = skyrl_config(config.skyrl_overrides(urls))
    reached("driver.started", role="driver", pid=os.getpid())
    experiment = ResumableExperiment(cfg, Setup(config.run_dir, "cpu", config.checkpoints))
    trainer = experiment._setup_trainer()
    if sys.argv[4:] == ["move-reference"]:
        trainer.global_step, trainer.train_dataloader.batch = 1, 1
        trainer.update_ref_with_policy()
        trainer.saver.save(1, {}, last=True)
        trainer.saver.finish()
        print('RESULT {"committed": null}', flush=True)
        os._exit(0)
    said: dict[str, str | None] = {}
    for name in ["nothing"] + [entry.name for entry in STATE if entry.present(cfg.trainer)]:
        left_out.write_text(name)
        if cfg.trainer.algorithm.use_kl_in_reward:
            trainer.reward_kl_controller = get_kl_controller(cfg.trainer.algorithm)
        try:
            restore_late(trainer, trainer.run, restore(trainer, trainer.run), time.monotonic())
            said[name] = None
        except Exception as error:
            cause = getattr(error, "cause", error)
            said[name] = f"{type(cause).__name__}: {cause}" if isinstance(cause, HarnessError) else repr(error)
    print("RESULT " + json.dumps(said), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
