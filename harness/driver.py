"""The process that trains: `python -m harness.driver RUN_CONFIG_JSON ENGINE_URLS_JSON`, started by the supervisor."""

import json
import os
import sys
import traceback

from checkpointing.errors import HarnessError
from harness.config import RunConfig


def main() -> int:
    config, urls = RunConfig.model_validate_json(sys.argv[1]), json.loads(sys.argv[2])
    try:
        from trainer.experiment import run_experiment  # imports SkyRL, so after the config was read
        from trainer.skyrl_config import skyrl_config

        cfg = skyrl_config(config.skyrl_overrides(urls))
        run_experiment(cfg, config.run_dir, config.ray_address, config.device, config.environments)
    except HarnessError as error:
        print(f"error: {error}", flush=True)
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        print(f"error: {type(error).__name__}: {error}", flush=True)
        return HarnessError.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # SkyRL's client and Ray keep threads that hold the interpreter open after training is done.
    os._exit(code)
