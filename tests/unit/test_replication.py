"""Commits arrive on another tier whole and in order or not at all, whatever is interrupted; nothing fails training."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpointing.canonical import canonical_json
from checkpointing.commit import Attempt, Commit, attempt_key, start_attempt
from checkpointing.errors import CheckpointError, CorruptBlob, Fenced, RunMismatch
from checkpointing.history import newest_restorable, valid_commits
from checkpointing.manifest import get_manifest, manifest_key
from checkpointing.phases import REPLICATION_PHASES
from checkpointing.replication import RUN_KEY, backlog, repair, replicate, undurable
from checkpointing.store import Store, open_store
from checkpointing.tiers import Tier, Tiers

from .checkpoint_samples import (
    Crash,
    Mortal,
    assert_whole,
    blob_keys,
    flip,
    listen,
    save,
    train,
)

pytestmark = pytest.mark.usefixtures("unsynced")


def carry_all(source: Store, target: Store, attempt: Attempt | None = None) -> None:
    for found in backlog(source, target, 100).pending:
        replicate(source, target, attempt, found)


# What waits


def test_what_the_target_lacks_waits_oldest_first(source: Store, target: Store) -> None:
    _, commits = train(source, None, 1, 2, 3)
    assert backlog(source, target, 3) == (tuple(commits), ())
    replicate(source, target, None, commits[0])
    assert backlog(source, target, 3) == (tuple(commits[1:]), ())
    carry_all(source, target)
    assert backlog(source, target, 3) == ((), ())


def test_too_many_waiting_are_coalesced_but_never_the_newest(source: Store, target: Store) -> None:
    _, commits = train(source, None, 1, 2, 3, 4)
    assert backlog(source, target, 1) == ((commits[3],), tuple(commits[:3]))
    replicate(source, target, None, commits[3])
    assert backlog(source, target, 1) == ((), ())  # what was let go does not come back


def test_a_history_that_went_another_way_counts_again_from_where_it_did(source: Store, target: Store) -> None:
    """The target is ahead by steps, and behind by what the run is now."""
    _, first = train(source, None, 1, 2, 3, 4)
    carry_all(source, target)
    attempt, second = train(source, first[1], 3, payload="other")
    assert backlog(source, target, 9) == (tuple(second), ())
    carry_all(source, target, attempt)
    assert_whole(target, *first[:2], *second)


def test_what_retention_deleted_from_the_source_does_not_wait_again(source: Store, target: Store) -> None:
    _, commits = train(source, None, 1, 2, 3, 4)
    carry_all(source, target)
    target.delete(commits[0].key)
    for found in commits[1:]:
        source.delete(found.key)
    assert backlog(source, target, 9) == ((), ())


def test_what_some_tier_waits_for_is_spared_except_what_was_let_go(source: Store) -> None:
    _, commits = train(source, None, 1, 2, 3, 4)
    keys = [found.key for found in commits]
    newest_first = commits[::-1]
    assert undurable(newest_first, {"s3": set()}, 2) == {keys[3], keys[2]}
    assert undurable(newest_first, {"s3": {keys[2]}}, 2) == {keys[3]}
    assert undurable(newest_first, {"s3": {keys[3]}, "s3-2": {keys[0]}}, 9) == set(keys[1:])
    assert undurable(newest_first, {}, 9) == set()


# Carrying


def test_a_replica_restores_by_itself(source: Store, target: Store) -> None:
    source.create(RUN_KEY, canonical_json({"run_id": "1"}))
    _, (one, two) = train(source, None, 1, 2)
    attempt, (three,) = train(source, two, 3)
    carry_all(source, target, attempt)
    assert [(item.key, item.size) for item in target.list("")] == [(item.key, item.size) for item in source.list("")]
    assert_whole(target, one, two, three)
    assert newest_restorable(target) == newest_restorable(source)


def test_only_new_bytes_are_moved(source: Store, target: Store) -> None:
    attempt, (one, two) = train(source, None, 1, 2, payload="same")
    first = replicate(source, target, attempt, one)
    assert first == one.manifest.size + sum(blob.size for blob in get_manifest(source, one.manifest).blobs())
    assert replicate(source, target, attempt, two) == two.manifest.size + len(b"2")
    assert replicate(source, target, attempt, two) == two.manifest.size


def test_the_phases_of_a_commit_on_its_way(source: Store, target: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, (one,) = train(source, None, 1)
    heard: list[tuple[str, Any]] = []
    listen(monkeypatch, lambda name, where: heard.append((name, where.get("step"))))
    replicate(source, target, attempt, one)
    names = [name for name, _ in heard if name.startswith("replicate.")]
    ends = ["replicate.before_manifest", "replicate.before_commit", "replicate.committed"]
    assert names == ["replicate.blob"] * 4 + ends and set(names) == REPLICATION_PHASES
    assert {step for name, step in heard if name in REPLICATION_PHASES} == {1}


def test_damage_is_not_carried_on(source: Store, target: Store) -> None:
    attempt, (one,) = train(source, None, 1)
    flip(source, blob_keys(source, one)[0])
    with pytest.raises(CorruptBlob, match=blob_keys(source, one)[0]):
        replicate(source, target, attempt, one)
    assert target.list("commits/") == []


@pytest.mark.parametrize("kind", ["attempt", "commit"])
def test_a_record_that_is_damaged_there_is_put_back(source: Store, target: Store, kind: str) -> None:
    attempt, (one,) = train(source, None, 1)
    replicate(source, target, attempt, one)
    flip(target, one.key if kind == "commit" else attempt.key)
    replicate(source, target, attempt, one)
    assert_whole(target, one)


def test_a_damaged_attempt_is_not_carried_and_neither_is_a_commit_of_it(source: Store, target: Store) -> None:
    _, (one,) = train(source, None, 1)
    attempt, (two,) = train(source, one, 2)
    flip(source, attempt_key(1))
    replicate(source, target, attempt, two)
    assert_whole(target, two)
    with pytest.raises(CorruptBlob, match="attempts/000001"):
        replicate(source, target, attempt, one)
    assert [item.key for item in target.list("commits/")] == [two.key]


def test_attempts_without_commits_are_carried_too(source: Store, target: Store) -> None:
    """They say where the history went, and fence whoever works on the target alone."""
    zombie, (one, two) = train(source, None, 1, 2)
    replicate(source, target, zombie, one)
    replicate(source, target, zombie, two)
    source.delete(two.key)
    attempt = start_attempt(source, one)
    replicate(source, target, attempt, one)
    assert valid_commits(target) == [one]
    with pytest.raises(Fenced):
        save(target, zombie, 3, two)


def test_a_tier_of_another_run_is_refused(source: Store, target: Store) -> None:
    source.create(RUN_KEY, canonical_json({"run_id": "1"}))
    target.create(RUN_KEY, canonical_json({"run_id": "2"}))
    attempt, (one,) = train(source, None, 1)
    with pytest.raises(RunMismatch, match="belongs to another run"):
        replicate(source, target, attempt, one)
    assert [item.key for item in target.list("")] == [RUN_KEY]


def test_an_attempt_that_another_cluster_started_under_the_same_number_is_refused(source: Store, target: Store) -> None:
    train(target, None, 1)
    attempt, (one,) = train(source, None, 1)
    with pytest.raises(Fenced):
        replicate(source, target, attempt, one)
    with pytest.raises(CheckpointError, match="two runs, or two starts"):
        replicate(source, target, None, one)


@pytest.mark.parametrize("place", ["source", "target"])
def test_a_zombie_can_not_replicate(source: Store, target: Store, place: str) -> None:
    """Also where only the other tier has heard of the newer attempt: two clusters with a file system each."""
    zombie, (one, two) = train(source, None, 1, 2)
    replicate(source, target, zombie, one)
    start_attempt({"source": source, "target": target}[place], one)
    source.create(RUN_KEY, b"{}")
    before = target.list("")
    with pytest.raises(Fenced):
        replicate(source, target, zombie, two)
    assert target.list("") == before


@pytest.mark.parametrize("place", ["source", "target"])
def test_a_zombie_that_wakes_up_before_its_commit_is_too_late(source: Store, target: Store, place: str) -> None:
    zombie, (one, two) = train(source, None, 1, 2)
    replicate(source, target, zombie, one)

    def overtaken(name: str, where: dict[str, Any]) -> None:
        if name == "replicate.before_commit":
            start_attempt({"source": source, "target": target}[place], one)

    with pytest.MonkeyPatch.context() as patched:
        listen(patched, overtaken)
        with pytest.raises(Fenced):
            replicate(source, target, zombie, two)
    assert [item.key for item in target.list("commits/")] == [one.key]


# Interrupted


def places(
    tmp_path: Path, act: Callable[[Store, Store], None], prepare: Callable[[Store, Store], None]
) -> Iterator[tuple[Store, Store, tuple[str, str]]]:
    """Source and target for each point at which `act` may die, after it has died there."""
    whole = open_store(str(tmp_path / "s")), Mortal(open_store(str(tmp_path / "t")))
    prepare(*whole)
    whole[1].calls.clear()
    act(*whole)
    assert whole[1].calls
    for index, place in enumerate(whole[1].calls):
        for done in (False, True):
            source = open_store(str(tmp_path / f"s{index}{done}"))
            target = open_store(str(tmp_path / f"t{index}{done}"))
            prepare(source, target)
            with pytest.raises(Crash):
                act(source, Mortal(target, index, done))
            yield source, target, place


def test_crash_point_sweep_of_replicate(tmp_path: Path) -> None:
    """At each point the target restores the newest commit or the one before it, and going on completes it."""
    made: dict[Store, list[Commit]] = {}

    def prepare(source: Store, target: Store) -> None:
        source.create(RUN_KEY, b"{}")
        _, (one,) = train(source, None, 1, payload="old")
        carry_all(source, target)
        _, (two,) = train(source, one, 2, payload="new")
        made[source] = [one, two]

    outcomes = []
    for source, target, place in places(tmp_path, carry_all, prepare):
        one, two = made[source]
        found, rejected = newest_restorable(target)
        assert found and rejected == [], place
        there = found[0] == two
        assert found[0] in (one, two) and there == (two.key in {item.key for item in target.list("commits/")})
        outcomes.append(there)
        assert newest_restorable(source)[0] == (two, get_manifest(source, two.manifest)), place
        carry_all(source, target)
        assert_whole(target, one, two)
        assert backlog(source, target, 9) == ((), ())
    assert outcomes == [False] * (len(outcomes) - 1) + [True]


def test_crash_point_sweep_of_repair(tmp_path: Path) -> None:
    made: dict[Store, list[Commit]] = {}

    def prepare(source: Store, target: Store) -> None:
        source.create(RUN_KEY, b"{}")
        attempt, commits = train(source, None, 1, 2)
        carry_all(source, target)
        made[source] = commits
        one, two = commits
        for key in (attempt.key, two.key, manifest_key(one.manifest), blob_keys(source, one)[0]):
            flip(target, key)
        for key in (one.key, manifest_key(two.manifest), blob_keys(source, two)[0], RUN_KEY):
            target.delete(key)

    def act(source: Store, target: Store) -> None:
        there = Tier("there", "", target)
        assert repair(Tiers([Tier("whole", "", source), there]), there, read_data=True).failed == {}

    for source, target, place in places(tmp_path, act, prepare):
        found, _ = newest_restorable(Tiers([Tier("a", "", target), Tier("b", "", source)]))
        assert found and found[0] == made[source][1], place
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(type(target), "delete", lambda *_: pytest.fail("repair deletes nothing"))
            act(source, target)
        assert_whole(target, *made[source])
        assert target.list("") == source.list("")


# Repair


def test_repair_says_what_it_wrote_and_what_is_lost(source: Store, target: Store) -> None:
    _, (one, two) = train(source, None, 1, 2)
    carry_all(source, target)
    lost, hurt = blob_keys(source, two)[0], blob_keys(source, one)[0]
    for store in (source, target):
        flip(store, lost)
    flip(source, hurt)
    source.delete(two.key)
    here = Tier("here", "", source)
    tiers = Tiers([here, Tier("there", "", target)])
    done = repair(tiers, here, read_data=True)
    assert done.written == (hurt,) and done.bytes_written == len(source.get(hurt))
    assert list(done.failed) == [lost, two.key] and "here" in done.failed[lost] and "there" in done.failed[lost]
    assert_whole(source, one)  # a commit whose bytes are lost is not put back
    assert repair(tiers, here, read_data=False).written == (two.key,)  # their absence is all that it would see


def test_repair_fills_an_empty_tier(source: Store, tmp_path: Path) -> None:
    train(source, None, 1, 2)
    empty = Tier("empty", "", open_store(str(tmp_path / "empty")))
    repair(Tiers([empty, Tier("whole", "", source)]), empty, read_data=False)
    assert empty.store.list("") == source.list("")
    assert repair(Tiers([empty, Tier("whole", "", source)]), empty, read_data=True) == ((), 0, {})
