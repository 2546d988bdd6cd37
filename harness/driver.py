"""The process that trains: `python -m harness.driver RUN_CONFIG_JSON ENGINE_URLS_JSON`, started by the supervisor.

With a third argument, a stock SkyRL checkpoint directory, it makes that the beginning of the run instead.
"""

import json
import sys
from pathlib import Path

from harness.config import RunConfig
from trainer.ending import end_process


def main() -> None:
    config, urls, stock = RunConfig.model_validate_json(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]

    from trainer.experiment import run_experiment  # imports SkyRL, so after the config was read
    from trainer.importing import import_run
    from trainer.setup import Setup
    from trainer.skyrl_config import skyrl_config

    cfg = skyrl_config(config.skyrl_overrides(urls))
    setup = Setup(
        directory=config.run_dir,
        device=config.device,
        checkpoints=config.checkpoints,
        ray_address=config.ray_address,
        envs=config.environments,
        engines=config.engines.model_dump(exclude={"count"}) if config.engines else {},
        restarts_per_hour=config.supervision.restarts_per_hour,
        node_wait_seconds=config.supervision.node_wait_seconds,
        fewer_nodes=config.supervision.fewer_nodes,
    )
    if stock:
        import_run(cfg, setup, Path(stock[0]))
    else:
        run_experiment(cfg, setup)


if __name__ == "__main__":
    end_process(main)
