"""Planted defects of the product, each of which schedules must find: {name: what it replaces}."""

import math
from collections.abc import Callable
from typing import Any

import pytest

import checkpointing.blobs
import checkpointing.commit
import checkpointing.replication
import checkpointing.replicator
import checkpointing.retention
import checkpointing.stores.posix
import checkpointing.stores.s3
import harness.policy
import trainer.run
import trainer.upkeep
from checkpointing.commit import Attempt, Commit, attempt_key, require_newest
from checkpointing.errors import AlreadyExists
from checkpointing.history import newest_restorable, valid_commits
from checkpointing.manifest import get_manifest
from checkpointing.records import seal
from checkpointing.store import Store
from harness.deadlines import Deadlines

from .disk import File
from .system import System
from .world import World

Mutation = Callable[[pytest.MonkeyPatch, World], None]


def commit_before_blobs(patched: pytest.MonkeyPatch, world: World) -> None:
    """A put of a blob returns before it is written."""
    for kind in (checkpointing.stores.posix.PosixStore, checkpointing.stores.s3.S3Store):
        put: Any = kind.put

        def behind(store: Any, key: str, data: Any, put: Any = put) -> None:
            if not key.startswith("blobs/"):
                put(store, key, data)
                return

            def later() -> None:
                world.clock.sleep(5.0)
                put(store, key, bytes(data))

            world.clock.start(world.clock.current.process, later)

        patched.setattr(kind, "put", behind)


def prune_takes_the_newest(patched: pytest.MonkeyPatch, world: World) -> None:
    patched.setattr(checkpointing.retention, "_kept", lambda *_: [])


def prune_forgets_the_next_tier(patched: pytest.MonkeyPatch, world: World) -> None:
    patched.setattr(trainer.upkeep, "undurable", lambda *_: set())


def blobs_go_with_their_first_commit(patched: pytest.MonkeyPatch, world: World) -> None:
    """What other commits share is deleted too."""
    patched.setattr(checkpointing.retention._Contents, "blobs_of", lambda contents, manifests: set())


def fencing_ignored(patched: pytest.MonkeyPatch, world: World) -> None:
    look = checkpointing.commit.newest_attempt
    patched.setattr(checkpointing.commit, "newest_attempt", lambda store: min(look(store), 0))


def lost_answer_is_a_defeat(patched: pytest.MonkeyPatch, world: World) -> None:
    def create(store: Store, record: Attempt | Commit) -> bool:
        try:
            store.create(record.key, seal(record))
        except AlreadyExists:
            return False
        return True

    patched.setattr(checkpointing.commit, "_create", create)


def folders_not_synced(patched: pytest.MonkeyPatch, world: World) -> None:
    patched.setattr(checkpointing.stores.posix, "fsync_dir", lambda folder: None)


def files_not_synced(patched: pytest.MonkeyPatch, world: World) -> None:
    sync = System.fsync
    patched.setattr(
        System, "fsync", lambda system, fd: None if isinstance(system._at(fd)[0], File) else sync(system, fd)
    )


def carried_commit_before_bytes(patched: pytest.MonkeyPatch, world: World) -> None:
    product = checkpointing.replication

    def replicate(source: Store, target: Store, attempt: Attempt, found: Commit) -> int:
        def permitted() -> None:
            require_newest(attempt, source, target)

        product._carry_run(source, target)
        product._carry_record(Attempt, source, target, attempt_key(found.attempt), permitted)
        product._carry_record(Commit, source, target, found.key, permitted)
        return product._carry_bytes(source, target, get_manifest(source, found.manifest), found)

    patched.setattr(checkpointing.replicator, "replicate", replicate)


def restore_verifies_nothing(patched: pytest.MonkeyPatch, world: World) -> None:
    patched.setattr(checkpointing.blobs, "_complaint", lambda data, expected: None)


def restore_takes_an_older_one(patched: pytest.MonkeyPatch, world: World) -> None:
    def older(store: Store, *, read_data: bool, unusable: dict[str, str]) -> Any:
        newest = [found.key for found in valid_commits(store)][:1]
        if len(valid_commits(store)) > 1:
            unusable = unusable | dict.fromkeys(newest, "too new")
        return newest_restorable(store, read_data=read_data, unusable=unusable)

    patched.setattr(trainer.run, "newest_restorable", older)


def poison_rule_off(patched: pytest.MonkeyPatch, world: World) -> None:
    verdict = harness.policy._verdict
    patched.setattr(harness.policy, "_verdict", lambda *args: (verdict(*args)[0], math.inf))


def sleeper_takes_the_run(patched: pytest.MonkeyPatch, world: World) -> None:
    """As it was before the simulation found it."""
    start = checkpointing.commit.start_attempt
    patched.setattr(trainer.run, "start_attempt", lambda store, resume, after: start(store, resume))


def breaker_off(patched: pytest.MonkeyPatch, world: World) -> None:
    patched.setattr(harness.policy, "NO_PROGRESS", 1000)


def budget_off(patched: pytest.MonkeyPatch, world: World) -> None:
    patched.setattr(harness.policy, "HOUR", 0.0)


def hangs_not_seen(patched: pytest.MonkeyPatch, world: World) -> None:
    patched.setattr(Deadlines, "_overdue", lambda *_: None)


MUTATIONS: dict[str, Mutation] = {
    mutation.__name__: mutation
    for mutation in (
        commit_before_blobs,
        prune_takes_the_newest,
        prune_forgets_the_next_tier,
        blobs_go_with_their_first_commit,
        fencing_ignored,
        lost_answer_is_a_defeat,
        folders_not_synced,
        files_not_synced,
        carried_commit_before_bytes,
        restore_verifies_nothing,
        restore_takes_an_older_one,
        poison_rule_off,
        sleeper_takes_the_run,
        breaker_off,
        budget_off,
        hangs_not_seen,
    )
}
