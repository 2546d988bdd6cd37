"""Promotions: a checkpoint that somebody depends on (an adapter that is served, a result that is cited) by a name."""

from checkpointing.commit import Commit, CommitKey
from checkpointing.errors import AlreadyExists, CheckpointError, ConfigError
from checkpointing.records import Record, seal, unseal
from checkpointing.store import Store, is_part
from checkpointing.tiers import Tiers


class Promotion(Record):
    """`commit` is promoted as `name`. Created once: a name never comes to mean another checkpoint."""

    name: str
    commit: CommitKey

    @property
    def key(self) -> str:
        return f"promotions/{self.name}.json"


def promote(tiers: Tiers, name: str, found: Commit) -> None:
    """From now on no tier's retention deletes `found`.

    Raises:
        ConfigError: not a name.
        CheckpointError: the name is another checkpoint's.
        StoreError: a tier refused; ask again.
    """
    if not is_part(f"{name}.json"):
        raise ConfigError(f"{name!r} is not a name: use letters, digits, '_', '.' and '-'")
    promotion = Promotion(name=name, commit=found.key)
    for tier in tiers.durable:
        try:
            tier.store.create(promotion.key, seal(promotion))
        except AlreadyExists:
            there = unseal(Promotion, tier.store.get(promotion.key), promotion.key)
            if there != promotion:
                raise CheckpointError(f"{name!r} is {there.commit} on {tier.name}; choose another name") from None


def promoted(store: Store) -> set[str]:
    """Keys of the commits that are promoted on `store`.

    Raises:
        CorruptBlob: a promotion is damaged, so that it is unknown what must stay.
        FormatError: one is intact but foreign or of a newer version.
    """
    keys = [item.key for item in store.list("promotions/")]
    return {unseal(Promotion, store.get(key), key).commit for key in keys}
