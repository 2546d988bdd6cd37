"""What a tier lets go of, and that deleting it, interrupted anywhere, loses no checkpoint and leaks no bytes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from checkpointing.blobs import Blob, put_blob
from checkpointing.commit import Attempt, Commit, attempt_key, start_attempt
from checkpointing.errors import Fenced
from checkpointing.events import Evaluated, Event, StepDone
from checkpointing.history import newest_restorable, valid_commits
from checkpointing.manifest import manifest_key
from checkpointing.phases import RETENTION_PHASES
from checkpointing.replication import backlog, replicate
from checkpointing.retention import Best, Keep, Plan, Pruner, measured, plan, unreferenced
from checkpointing.store import Store, open_store

from .checkpoint_samples import (
    Crash,
    Mortal,
    assert_whole,
    blob_keys,
    flip,
    goes,
    kinds,
    listen,
    prune_all,
    sample,
    save,
    train,
)

NONE: Mapping[int, float] = {}


pytestmark = pytest.mark.usefixtures("unsynced")


def step_done(step: int, **scalars: str) -> StepDone:
    empty: dict[str, Any] = {"state": {}, "data": {}, "zero_advantages": False, "seconds": 0, "digest_seconds": 0}
    return StepDone(step=step, epoch=0, scalars=scalars, **empty)


# Policies


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (Keep(), [9]),
        (Keep(newest=3), [7, 8, 9]),
        (Keep(newest=100), [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (Keep(every=4), [4, 8, 9]),
        (Keep(newest=2, every=3), [3, 6, 8, 9]),
        (Keep(best=Best(metric="reward", count=2)), [2, 5, 9]),
        (Keep(best=Best(metric="reward", count=1, mode="min")), [3, 9]),
        (Keep(newest=2, every=7, best=Best(metric="reward", count=1)), [5, 7, 8, 9]),
    ],
)
def test_what_any_policy_names_stays(store: Store, keep: Keep, kept: list[int]) -> None:
    train(store, None, *range(1, 10))
    # Of two equals the newer is the better one; what was not measured, or is not a number, is none of the best.
    rewards = {1: 2.0, 2: 3.0, 3: -1.0, 4: float("nan"), 5: 3.0, 6: float("inf"), 77: 100.0}
    assert goes(store, keep, metrics=rewards) == [step for step in range(1, 10) if step not in kept]


@given(
    steps=st.sets(st.integers(1, 12), min_size=1),
    newest=st.integers(1, 5),
    every=st.none() | st.integers(1, 5),
    protected=st.sets(st.integers(1, 12)),
)
def test_policies_by_their_definition(
    tmp_path_factory: pytest.TempPathFactory, steps: set[int], newest: int, every: int | None, protected: set[int]
) -> None:
    store = open_store(str(tmp_path_factory.mktemp("store")))
    _, commits = train(store, None, *sorted(steps))
    named = {found.key for found in commits if found.step in protected}
    stay = set(sorted(steps)[-newest:]) | (steps & protected) | {step for step in steps if every and step % every == 0}
    assert goes(store, Keep(newest=newest, every=every), named) == sorted(steps - stay)


@pytest.mark.parametrize("wrong", [{"newest": 0}, {"every": 0}, {"oldest": 1}, {"best": {"metric": "x", "count": 0}}])
def test_a_policy_that_can_not_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Keep.model_validate(wrong)


def test_a_metric_is_read_from_evaluations_and_from_steps() -> None:
    events: list[Event] = [
        Evaluated(step=0, metrics={"eval/reward": 0.25}),
        step_done(1, reward=(0.1).hex(), loss="0x0p+0"),
        Evaluated(step=1, metrics={"other": 9.0}),
        step_done(2),
    ]
    assert measured(events, "eval/reward") == {0: 0.25}
    assert measured(events, "reward") == {1: 0.1}


# Always spared


def test_the_commit_resumed_from_stays_when_newer_ones_exist(store: Store) -> None:
    _, commits = train(store, None, 1, 2)
    train(store, commits[0], 5, 6, 7)
    assert goes(store, Keep()) == [2, 5, 6]  # 2 was abandoned by resuming from 1


def test_abandoned_commits_go_unless_they_are_protected(store: Store) -> None:
    _, (one, _, three) = train(store, None, 1, 2, 3)
    train(store, one, 2)
    assert goes(store, Keep(newest=100)) == [2, 3]
    assert goes(store, Keep(newest=100), {three.key}) == [2]


def test_what_is_damaged_does_not_count_and_stays_until_enough_whole_ones_are_newer(store: Store) -> None:
    attempt, commits = train(store, None, 1, 2, 3, 4)
    store.delete(blob_keys(store, commits[2])[0])
    assert goes(store, Keep(newest=2)) == [1]  # 2 and 4 are the newest two
    assert goes(store, Keep(newest=3)) == []
    save(store, attempt, 5, commits[3], payload="step 5")
    assert goes(store, Keep(newest=2)) == [1, 2, 3]


def test_nothing_goes_while_nothing_is_whole(store: Store) -> None:
    _, (one, two) = train(store, None, 1, 2)
    start_attempt(store, one)
    for found in (one, two):
        store.delete(manifest_key(found.manifest))
    assert plan(store, Keep(), frozenset(), NONE) == Plan()


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("how", ["flip", "delete"])
def test_nothing_goes_while_an_attempt_is_unreadable(store: Store, number: int, how: str) -> None:
    """If it is the newest, what it resumed from is unknown; if it is another, so is which commits are abandoned."""
    _, commits = train(store, None, 1, 2, 3)
    train(store, commits[1], 3, 4)
    assert goes(store, Keep()) == [1, 3, 3]
    {"flip": flip, "delete": type(store).delete}[how](store, attempt_key(number))
    assert plan(store, Keep(), frozenset(), NONE) == Plan()


@pytest.mark.parametrize("part", ["record", "manifest", "both"])
def test_bytes_that_an_unreadable_commit_may_need_stay(store: Store, tmp_path: Path, part: str) -> None:
    """Whatever else was pruned, a commit that is kept is whole again once its damaged part is put back."""
    attempt, commits = train(store, None, 1, 2, 3, 4)
    mirror = open_store(str(tmp_path / "mirror"))
    for found in backlog(store, mirror, 9).pending:
        replicate(store, mirror, None, found)
    hurt = commits[1]
    keys = {"record": [hurt.key], "manifest": [manifest_key(hurt.manifest)]}
    for key in keys.get(part, [*keys["record"], *keys["manifest"]]):
        flip(store, key)
    prune_all(store, attempt, Keep(newest=1, every=2))
    for key in [*keys["record"], *keys["manifest"]]:
        store.put(key, mirror.get(key))
    assert_whole(store, hurt, commits[3])


# Deleting


def test_bytes_go_a_checkpoint_after_their_commit(store: Store) -> None:
    attempt, commits = train(store, None, 1, 2, 3)
    pruner, before = Pruner(store, Keep()), sum(item.size for item in store.list(""))
    first = pruner.prune(attempt, frozenset(), NONE)
    assert [item.key for item in first.commits] == [found.key for found in commits[:2]] and first.orphans == ()
    assert kinds(store) == {"commits": 1, "manifests": 3, "blobs": 3 * 3 + 1}
    second = pruner.prune(attempt, frozenset(), NONE)
    assert second.commits == () and len(second.orphans) == 2
    assert kinds(store) == {"commits": 1, "manifests": 1, "blobs": 4}
    assert sum(item.size for item in store.list("")) == before - first.bytes_freed - second.bytes_freed
    assert_whole(store, commits[2])


def test_a_dry_run_says_how_many_bytes_go_and_deletes_none(store: Store) -> None:
    attempt, _ = train(store, None, 1, 2, 3)
    items = store.list("")
    found = plan(store, Keep(), frozenset(), NONE)
    assert store.list("") == items
    prune_all(store, attempt, Keep())
    assert found.bytes_freed == sum(item.size for item in items) - sum(item.size for item in store.list("")) > 0


def test_bytes_that_are_shared_stay_until_their_last_commit_goes(store: Store) -> None:
    attempt, (one, two) = train(store, None, 1, 2, payload="same")
    prune_all(store, attempt, Keep())
    assert_whole(store, two)
    assert kinds(store) == {"commits": 1, "manifests": 1, "blobs": 4}
    assert not set(blob_keys(store, two)) - {item.key for item in store.list("blobs/")}
    assert one.key not in {item.key for item in store.list("commits/")}


def test_bytes_that_are_shared_stay_for_the_grace_of_the_last_commit_to_go(store: Store) -> None:
    attempt, (one, two) = train(store, None, 1, 2, payload="same")
    save(store, attempt, 3, two, payload="other")
    pruner, shared = Pruner(store, Keep()), set(blob_keys(store, one)) & set(blob_keys(store, two))
    for protected, left in (({two.key}, 3), (set(), 2), (set(), 1)):
        assert shared <= {item.key for item in store.list("blobs/")}
        pruner.prune(attempt, protected, {})
        assert len(store.list("manifests/")) == left
    null = Blob.of(b"null").key
    assert shared & {item.key for item in store.list("blobs/")} == {null}


def test_what_is_saved_again_between_two_prunes_stays(store: Store) -> None:
    """A save skips blobs that are there: those of an orphan that has been seen must not go from under it."""
    attempt, commits = train(store, None, 1, 2)
    pruner = Pruner(store, Keep())
    pruner.prune(attempt, frozenset(), NONE)
    three = save(store, attempt, 3, commits[1], payload="step 1")
    pruner.prune(attempt, frozenset(), NONE)
    pruner.prune(attempt, frozenset(), NONE)
    assert_whole(store, three)


def test_what_a_killed_save_left_is_deleted_at_the_next_start(store: Store) -> None:
    attempt, (one,) = train(store, None, 1)
    left = put_blob(store, b"no manifest names this")
    named = sample(store, 2, "killed before its manifest").blobs()
    expected = {left.key, *(blob.key for blob in named)} - set(blob_keys(store, one))
    assert {item.key for item in unreferenced(store)} == expected
    attempt = start_attempt(store, one)
    assert Pruner(store, Keep()).sweep(attempt) > 0
    assert unreferenced(store) == ()
    assert_whole(store, one)


def test_nothing_is_taken_for_unreferenced_while_a_manifest_is_unreadable(store: Store) -> None:
    _, (one, _) = train(store, None, 1, 2)
    put_blob(store, b"no manifest names this")
    assert len(unreferenced(store)) == 1
    store.delete(manifest_key(one.manifest))
    assert unreferenced(store) == ()


@pytest.mark.parametrize("what", ["prune", "sweep"])
def test_a_zombie_can_not_prune(store: Store, what: str) -> None:
    zombie, commits = train(store, None, 1, 2, 3)
    put_blob(store, b"unreferenced")
    pruner = Pruner(store, Keep())
    start_attempt(store, commits[0])
    before = store.list("")
    with pytest.raises(Fenced):
        pruner.sweep(zombie) if what == "sweep" else pruner.prune(zombie, frozenset(), NONE)
    assert store.list("") == before


def test_a_zombie_that_wakes_up_between_two_deletes_stops(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    zombie, commits = train(store, None, 1, 2, 3)

    def overtaken(name: str, where: dict[str, Any]) -> None:
        if name == "prune.commit_deleted":
            start_attempt(store, commits[1])

    listen(monkeypatch, overtaken)
    with pytest.raises(Fenced):
        Pruner(store, Keep()).prune(zombie, frozenset(), NONE)
    assert valid_commits(store) == [commits[1]]  # 3 is abandoned now, and 1 was deleted before


def test_a_zombie_is_fenced_by_the_primary_where_the_tier_has_not_heard_of_its_end(
    store: Store, tmp_path: Path
) -> None:
    zombie, (one, two) = train(store, None, 1, 2)
    remote = open_store(str(tmp_path / "remote"))
    for found in (one, two):
        replicate(store, remote, zombie, found)
    start_attempt(store, one)
    before = remote.list("")
    with pytest.raises(Fenced):
        Pruner(remote, Keep(), store).prune(zombie, frozenset(), {})
    assert remote.list("") == before


def test_a_tier_that_has_not_heard_of_the_attempt_is_not_pruned(store: Store, tmp_path: Path) -> None:
    """There, 1 would be let go for 3, which the run has abandoned."""
    attempt, (one, two, three) = train(store, None, 1, 2, 3)
    remote = open_store(str(tmp_path / "remote"))
    for found in (one, three):
        replicate(store, remote, attempt, found)
    attempt, (other,) = train(store, two, 3, payload="other")
    prune_all(remote, attempt, Keep())
    assert len(remote.list("commits/")) == 2
    replicate(store, remote, attempt, other)
    prune_all(remote, attempt, Keep())
    assert_whole(remote, other)


def test_the_phases_of_a_prune(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, _ = train(store, None, 1, 2)
    heard: list[str] = []
    listen(monkeypatch, lambda name, where: heard.append(name))
    prune_all(store, attempt, Keep())
    assert heard == ["prune.commit_deleted", *["prune.blob_deleted"] * 3, "prune.manifest_deleted"]
    assert set(heard) == RETENTION_PHASES


def test_crash_point_sweep_of_prune(tmp_path: Path) -> None:
    """At each point the newest commit restores and so does the one resumed from; going on leaves nothing behind."""

    def prepare(folder: str) -> tuple[Store, Attempt, list[Commit]]:
        store = open_store(str(tmp_path / folder))
        _, commits = train(store, None, 1, 2, 3)
        attempt, later = train(store, commits[1], 3, 4, 5)
        return store, attempt, [*commits, *later]

    store, attempt, commits = prepare("whole")
    whole = Mortal(store)
    prune_all(whole, attempt, Keep())
    end = kinds(store)
    assert end == {"commits": 2, "manifests": 2, "blobs": 7}
    for index, place in enumerate(whole.calls):
        for done in (False, True):
            store, attempt, commits = prepare(f"{index}{done}")
            with pytest.raises(Crash):
                prune_all(Mortal(store, index, done), attempt, Keep())
            found, rejected = newest_restorable(store)
            assert found and found[0] == commits[-1] and not [item for item in rejected if not item.abandoned], place
            assert commits[1] in valid_commits(store), place
            for each in valid_commits(store):
                assert set(blob_keys(store, each)) <= {item.key for item in store.list("blobs/")}, place
            # The next attempt; it resumes from the newest, so that what the one before came from may go.
            prune_all(store, start_attempt(store, commits[-1]), Keep())
            assert_whole(store, commits[-1])
            assert kinds(store) == {"commits": 1, "manifests": 1, "blobs": 4}, place


def test_a_tier_without_commits_is_left_alone(store: Store) -> None:
    assert Pruner(store, Keep()).prune(start_attempt(store, None), frozenset(), NONE) == Plan()
