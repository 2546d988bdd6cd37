"""The process that trains: `python -m harness.driver RUN_CONFIG_JSON ENGINE_URLS_JSON`, started by the supervisor."""

import json
import sys

from harness.config import RunConfig
from trainer.ending import end_process


def main() -> None:
    config, urls = RunConfig.model_validate_json(sys.argv[1]), json.loads(sys.argv[2])

    from trainer.experiment import run_experiment  # imports SkyRL, so after the config was read
    from trainer.skyrl_config import skyrl_config

    cfg = skyrl_config(config.skyrl_overrides(urls))
    run_experiment(cfg, config.run_dir, config.ray_address, config.device, config.environments)


if __name__ == "__main__":
    end_process(main)
