"""The State: everything that must survive, one line an entry. This list is the only place that knows what it is.

An entry is captured by its owner: each rank of an actor group (`policy`, `critic`, `ref`) captures its own shard, the
driver captures the rest. The order is the order of restoring. `late` entries are restored at the first epoch start,
after everything in SkyRL's start-up that would overwrite them or draw from them; RNG streams are last of their owner.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer import driver_state, rank_state
from trainer.captured import Captured
from trainer.reshard import Rule, by_placement, derived_rng, same_on_every_rank


def _always(cfg: Any) -> bool:
    return True


def _critic(cfg: Any) -> bool:
    return bool(cfg.critic.model.path)


def _moving_reference(cfg: Any) -> bool:
    reference = cfg.algorithm.use_kl_loss or cfg.algorithm.use_kl_in_reward
    return bool(reference and cfg.update_ref_every_epoch)


def _kl_in_reward(cfg: Any) -> bool:
    return bool(cfg.algorithm.use_kl_in_reward)


@dataclass(frozen=True)
class Entry:
    """`capture(owner) -> Captured` and `restore(owner, captured)`; `present(cfg)` says whether a run has it; `reshard`
    makes what a rank restores from what another number of ranks saved.

    `cfg` is SkyRL's `TrainerConfig` (the `trainer` section), which ranks and driver both hold.
    """

    name: str
    capture: Callable[[Any], Captured]
    restore: Callable[[Any, Captured], None]
    reshard: Rule | None = None
    present: Callable[[Any], bool] = _always
    late: bool = False

    @property
    def owner(self) -> str:
        return self.name.partition("/")[0]


# fmt: off
PARAMETERS = (rank_state.capture_parameters, rank_state.restore_parameters, by_placement)
ALL_PARAMETERS = (rank_state.capture_all_parameters, rank_state.restore_all_parameters, by_placement)
OPTIMIZER = (rank_state.capture_optimizer, rank_state.restore_optimizer, by_placement)
SCHEDULER = (rank_state.capture_scheduler, rank_state.restore_scheduler, same_on_every_rank)
RNG = (rank_state.capture_rng, rank_state.restore_rng, derived_rng)

STATE: list[Entry] = [
    Entry("policy/parameters", *PARAMETERS),
    Entry("policy/optimizer", *OPTIMIZER),
    Entry("policy/lr_scheduler", *SCHEDULER),
    Entry("policy/rng", *RNG),
    Entry("critic/parameters", *PARAMETERS, present=_critic),
    Entry("critic/optimizer", *OPTIMIZER, present=_critic),
    Entry("critic/lr_scheduler", *SCHEDULER, present=_critic),
    Entry("critic/rng", *RNG, present=_critic),
    Entry("ref/parameters", *ALL_PARAMETERS, present=_moving_reference),
    Entry("driver/frozen_models", driver_state.capture_frozen_models, driver_state.restore_frozen_models),
    Entry("driver/global_step", driver_state.capture_step, driver_state.restore_step),
    Entry("driver/data_position", driver_state.capture_position, driver_state.restore_position),
    Entry("driver/dynamic_sampling", driver_state.capture_dynamic_sampling, driver_state.restore_dynamic_sampling),
    Entry("driver/callbacks", driver_state.capture_callbacks, driver_state.restore_callbacks),
    Entry("driver/kl_controller", driver_state.capture_kl, driver_state.restore_kl, present=_kl_in_reward, late=True),
    Entry("driver/rng", rank_state.capture_rng, rank_state.restore_rng, late=True),
]
# fmt: on


def entries_of(owner: str, cfg: Any) -> list[Entry]:
    """The entries that `owner` ("driver" or a role) captures under SkyRL's `trainer` config, in restoring order."""
    return [entry for entry in STATE if entry.owner == owner and entry.present(cfg)]
