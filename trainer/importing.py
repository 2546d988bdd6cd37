"""A new run that begins with what stock SkyRL saved: its checkpoint becomes the run's first commit."""

import trainer.cpu  # noqa: F401  # isort: skip  # first: it answers for CUDA before SkyRL binds torch's names

from pathlib import Path
from typing import Any

from skyrl.backends.skyrl_train.utils.ppo_utils import get_kl_controller
from skyrl.train.config import SkyRLTrainConfig

from checkpointing.commit import attempt_numbers, commit, start_attempt
from checkpointing.errors import ConfigError, MissingEntry
from trainer.captured import Captured
from trainer.determinism import seed_streams
from trainer.experiment import ResumableExperiment
from trainer.identity import frozen_models
from trainer.interchange.stock import import_stock
from trainer.interchange.write import write_manifest
from trainer.rank_state import capture_rng
from trainer.run import claim_directory, identity, topology
from trainer.setup import Setup
from trainer.state import STATE


class _Import(ResumableExperiment):
    """As far as a run's identity, which needs tokenizer and data; then a commit instead of training."""

    def __init__(self, cfg: SkyRLTrainConfig, setup: Setup, stock: Path) -> None:
        self.stock = stock
        super().__init__(cfg, setup)

    def get_colocate_pg(self, *args: Any) -> Any:
        tiers, signer = self.setup.checkpoints.open(self.setup.directory), self.setup.checkpoints.signer()
        if attempt_numbers(tiers):
            raise ConfigError(f"{self.setup.directory}: a run has been started there; import into a new run directory")
        found = import_stock(self.stock, len(self.train_dataset))
        mine = identity(self.cfg, self.fingerprint)
        ranks = topology(self.cfg)
        ranks |= {name.partition("/")[0]: len(saved) for name, saved in found.entries.items() if name[0] != "d"}
        entries = found.entries | _begun(self.cfg)
        for entry in STATE:
            if entry.present(self.cfg.trainer) and entry.name not in entries:
                raise MissingEntry(f"{self.stock}: stock SkyRL does not save {entry.name}, which this config needs")
        claim_directory(tiers, self.cfg, mine)
        attempt = start_attempt(tiers, None)
        store = tiers.primary.store
        commit(store, attempt, write_manifest(store, found.step, entries, ranks, mine), None, signer)
        self.step = found.step
        return None


def _begun(cfg: SkyRLTrainConfig) -> dict[str, list[Captured]]:
    """What stock SkyRL does not save of the driver, as it is in a run that begins."""
    seed_streams(cfg.trainer.seed)
    begun = {
        "driver/frozen_models": Captured({}, frozen_models(cfg)),
        "driver/callbacks": Captured({}, {}),
        "driver/rng": capture_rng(None),
    }
    if cfg.trainer.algorithm.use_kl_in_reward:
        controller = get_kl_controller(cfg.trainer.algorithm)
        begun["driver/kl_controller"] = Captured({}, {"value": float(controller.value)})
    return {name: [captured] for name, captured in begun.items()}


def import_run(cfg: SkyRLTrainConfig, setup: Setup, stock: Path) -> int:
    """Make the stock checkpoint in `stock` (`.../global_step_N`) the first commit of the run that `setup` names.

    Returns the step that the run goes on from.

    Raises:
        ConfigError: a run has been started in its directory.
        CheckpointError: `stock` can't be read, or lacks what this config needs.
    """
    return _Import(cfg, setup, stock).step
