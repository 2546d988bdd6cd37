"""Faults that others have reported of replicas and retention, each with what must hold here instead."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from checkpointing.commit import Commit, commit, start_attempt
from checkpointing.errors import Fenced, StoreError
from checkpointing.history import newest_restorable, valid_commits
from checkpointing.replication import backlog, repair, replicate, undurable
from checkpointing.retention import Keep, Pruner
from checkpointing.store import Store, open_store
from checkpointing.tiers import Tier, Tiers

from .checkpoint_samples import (
    Wrapper,
    assert_whole,
    blob_keys,
    goes,
    kinds,
    prune_all,
    sample,
    save,
    train,
)

NONE: Mapping[int, float] = {}


pytestmark = pytest.mark.usefixtures("unsynced")


def test_kempnerforge_102_cleanup_before_the_new_checkpoint_is_durable(store: Store, tmp_path: Path) -> None:
    """While the newest save is still being written, or is not on the next tier, the old one stays loadable."""
    attempt, (one,) = train(store, None, 1)
    sample(store, 2, "being written")
    prune_all(store, attempt, Keep())
    assert_whole(store, one)
    two = save(store, attempt, 2, one, payload="being written")
    durable = open_store(str(tmp_path / "durable"))
    replicate(store, durable, attempt, one)
    assert goes(store, Keep(), undurable(valid_commits(store), {"s3": set()}, 4)) == []
    assert goes(store, Keep(), undurable(valid_commits(store), {"s3": {one.key}}, 4)) == [1]
    assert two.key in undurable(valid_commits(store), {"s3": {one.key}}, 4)


def test_verl_4873_the_old_checkpoint_goes_before_the_new_one_is_saved(store: Store) -> None:
    attempt, (one,) = train(store, None, 1)

    class Full(Wrapper):
        def put(self, key: str, data: Any) -> None:
            raise StoreError("no space")

    with pytest.raises(StoreError):
        save(Full(store), attempt, 2, one)
    prune_all(store, attempt, Keep())
    assert_whole(store, one)


def test_verl_7395_each_restart_leaks_a_checkpoint(store: Store) -> None:
    resume: Commit | None = None
    for step in range(1, 6):
        attempt, (resume,) = train(store, resume, step)
        Pruner(store, Keep()).prune(attempt, frozenset(), NONE)
        # The newest, and the one that this attempt resumed from: a new process each time leaks no third.
        assert len(store.list("commits/")) <= 2
    prune_all(store, start_attempt(store, resume), Keep())
    assert kinds(store) == {"commits": 1, "manifests": 1, "blobs": 4}


def test_lightning_21813_the_checkpoint_resumed_from_is_deleted(store: Store) -> None:
    _, (one, _) = train(store, None, 1, 2)
    attempt = start_attempt(store, one)
    sample(store, 2, "a save that fails")
    prune_all(store, attempt, Keep())
    assert_whole(store, one)
    three = save(store, attempt, 3, one)
    prune_all(store, attempt, Keep())
    assert_whole(store, one, three)


def test_nemo_speech_10887_a_later_restart_needs_what_was_deleted(store: Store) -> None:
    """Each checkpoint is whole by itself, what it shares with deleted ones included."""
    resume: Commit | None = None
    for step in range(1, 5):
        attempt, (resume,) = train(store, resume, step, payload="never changes")
        prune_all(store, attempt, Keep())
        found, rejected = newest_restorable(store)
        assert found and found[0] == resume and rejected == []


def test_skyrl_156_keeping_few_locally_deletes_in_s3(store: Store, tmp_path: Path) -> None:
    attempt, commits = start_attempt(store, None), list[Commit]()
    remote, pruner = open_store(str(tmp_path / "s3")), Pruner(store, Keep(newest=2))
    for step in range(1, 7):
        commits.append(save(store, attempt, step, commits[-1] if commits else None, payload=f"step {step}"))
        replicate(store, remote, attempt, commits[-1])
        pruner.prune(attempt, frozenset(), NONE)
    assert_whole(store, *commits[-2:])
    assert_whole(remote, *commits)


def test_sagemaker_3062_the_mirror_stops_unseen(store: Store, tmp_path: Path) -> None:
    """What waits for the mirror is a figure, and stays on the tier before it while the backlog allows."""
    attempt, commits = train(store, None, *range(1, 51))
    mirror = open_store(str(tmp_path / "mirror"))
    for found in commits[:18]:
        replicate(store, mirror, attempt, found)
    waiting = backlog(store, mirror, 4)
    assert len(waiting.pending) + len(waiting.coalesced) == 32
    assert goes(store, Keep(), undurable(valid_commits(store), {"mirror": {commits[17].key}}, 4)) == [*range(1, 47)]


def test_ray_36357_the_partial_local_copy_is_preferred_to_the_whole_remote_one(store: Store, tmp_path: Path) -> None:
    attempt, (one, two) = train(store, None, 1, 2)
    remote = open_store(str(tmp_path / "s3"))
    for found in (one, two):
        replicate(store, remote, attempt, found)
    store.delete(blob_keys(store, two)[0])
    local = newest_restorable(store)[0]
    assert local and local[0] == one
    tiers = Tiers([Tier("file", "", store), Tier("s3", "", remote)])
    assert newest_restorable(tiers) == newest_restorable(remote)
    assert repair(tiers, tiers.primary, read_data=False).written == (blob_keys(remote, two)[0],)
    assert_whole(store, one, two)


def test_s3fs_154_a_write_that_failed_half_way_is_committed(store: Store, tmp_path: Path) -> None:
    attempt, (one,) = train(store, None, 1)

    class Short(Wrapper):
        def put(self, key: str, data: Any) -> None:
            super().put(key, bytes(data)[:-1])
            raise StoreError("connection reset")

    remote = open_store(str(tmp_path / "s3"))
    with pytest.raises(StoreError):
        replicate(store, Short(remote), attempt, one)
    assert remote.list("manifests/") == remote.list("commits/") == []
    replicate(store, remote, attempt, one)  # what has another size is no proof that it is there
    assert_whole(remote, one)


def test_a_zombie_can_neither_commit_nor_prune_nor_replicate(store: Store, tmp_path: Path) -> None:
    remote = open_store(str(tmp_path / "s3"))
    zombie, (one, two) = train(store, None, 1, 2)
    replicate(store, remote, zombie, one)
    manifest = sample(store, 3, "zombie")
    start_attempt(store, one)
    before = store.list(""), remote.list("")
    for act in (
        lambda: Pruner(store, Keep()).prune(zombie, frozenset(), NONE),
        lambda: replicate(store, remote, zombie, two),
        lambda: commit(store, zombie, manifest, two),
    ):
        with pytest.raises(Fenced):
            act()
    assert [item for item in store.list("") if not item.key.startswith("manifests/")] == [
        item for item in before[0] if not item.key.startswith("manifests/")
    ]
    assert remote.list("") == before[1]
