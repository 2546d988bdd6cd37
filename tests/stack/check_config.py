"""Do what a driver does before it starts Ray, for each run config (JSON) on standard input; print what it says.

One process for all cases: importing SkyRL is what takes the time.
"""

import json
import sys

from checkpointing.errors import HarnessError
from harness.config import RunConfig


def main() -> None:
    from trainer import experiment
    from trainer.setup import Setup
    from trainer.skyrl_config import skyrl_config

    def started(*_: object) -> None:
        raise RuntimeError("accepted: Ray would be started now")

    experiment.start_ray = started  # type: ignore[assignment]
    for line in sys.stdin:
        config = RunConfig.model_validate_json(line)
        try:
            cfg = skyrl_config(config.skyrl_overrides(["http://127.0.0.1:1"]))
            experiment.ResumableExperiment(cfg, Setup(config.run_dir, "cpu", config.checkpoints))
            said = "nothing to do"
        except HarnessError as error:
            said = f"{type(error).__name__} {error.exit_code}: {error}"
        except RuntimeError as error:
            said = str(error)
        print("SAID " + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
