"""A promoted checkpoint stays, under a name that never comes to mean another."""

from pathlib import Path

import pytest

from checkpointing.commit import Commit, start_attempt
from checkpointing.errors import CheckpointError, ConfigError
from checkpointing.history import newest_restorable, valid_commits
from checkpointing.promotion import promote, promoted
from checkpointing.retention import Keep, Pruner
from checkpointing.tiers import Tiers

from .checkpoint_samples import save


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    return Tiers.open([str(tmp_path / "near"), str(tmp_path / "far")])


def test_no_tier_deletes_what_is_promoted(tiers: Tiers) -> None:
    store = tiers.primary.store
    attempt = start_attempt(store, None)
    commits: list[Commit] = []
    for step in range(1, 6):
        commits.append(save(store, attempt, step, commits[-1] if commits else None, payload=f"step {step}"))
    promote(tiers, "served", commits[1])
    promote(tiers, "served", commits[1])
    assert [promoted(tier.store) for tier in tiers.durable] == [{commits[1].key}] * 2
    pruner = Pruner(store, Keep(newest=1))
    for _ in range(3):
        pruner.prune(attempt, frozenset(), {})
    assert [found.step for found in valid_commits(store)] == [5, 2]
    unusable = {commits[4].key: "to see that the promoted one is whole"}
    found, _ = newest_restorable(store, unusable=unusable)
    assert found and found[0] == commits[1]


def test_nothing_is_deleted_while_a_promotion_is_unreadable(tiers: Tiers) -> None:
    store = tiers.primary.store
    attempt = start_attempt(store, None)
    first = save(store, attempt, 1, None)
    save(store, attempt, 2, first)
    promote(tiers, "served", first)
    store.put("promotions/served.json", b"{")
    assert Pruner(store, Keep(newest=1)).prune(attempt, frozenset(), {}).commits == ()
    assert len(valid_commits(store)) == 2


def test_a_name_never_comes_to_mean_another(tiers: Tiers) -> None:
    attempt = start_attempt(tiers, None)
    first = save(tiers, attempt, 1, None)
    second = save(tiers, attempt, 2, first)
    promote(tiers, "served", first)
    with pytest.raises(CheckpointError, match=r"'served' is .* choose another name"):
        promote(tiers, "served", second)
    with pytest.raises(ConfigError, match="is not a name"):
        promote(tiers, "../served", first)
