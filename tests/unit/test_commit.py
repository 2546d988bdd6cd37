"""Which commits count, who may add one, and what is chosen when some of it is damaged."""

import json
from collections.abc import Buffer, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from checkpointing.canonical import canonical_json, digest
from checkpointing.commit import Attempt, Commit, attempt_key, commit_key, start_attempt
from checkpointing.errors import CheckpointError, ConfigError, Fenced, FormatError, StoreError
from checkpointing.history import Rejected, newest_restorable, ranked_commits, valid_commits
from checkpointing.manifest import get_manifest
from checkpointing.records import seal
from checkpointing.store import AlreadyExists, Item, Promises, Store, open_store
from checkpointing.tiers import Tier, Tiers

from .checkpoint_samples import Wrapper, late, save, without_fsync


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with without_fsync():
        yield open_store(str(tmp_path / "store"))


def train(store: Store, resume: Commit | None, *steps: int) -> tuple[Attempt, list[Commit]]:
    """One attempt that commits `steps`."""
    attempt, commits = start_attempt(store, resume), []
    for step in steps:
        resume = save(store, attempt, step, resume, payload=f"step {step}")
        commits.append(resume)
    return attempt, commits


def newest(store: Store, read_data: bool = True) -> tuple[Commit | None, list[Rejected]]:
    found, rejected = newest_restorable(store, read_data=read_data)
    return found and found[0], rejected


def flip_a_bit(store: Store, key: str) -> None:
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 4
    store.put(key, data)


def edit(store: Store, key: str, **changes: Any) -> None:
    """Forge a record: its check is right again."""
    body = json.loads(store.get(key)) | changes
    del body["check"]
    store.put(key, canonical_json(body | {"check": digest(canonical_json(body))}))


# Writing


def test_an_empty_store_starts_from_the_beginning(store: Store) -> None:
    assert newest_restorable(store) == (None, [])
    assert valid_commits(store) == []


def test_a_run_and_its_resumes(store: Store) -> None:
    first, (one, two) = train(store, None, 1, 2)
    second, (three,) = train(store, two, 3)
    assert (first.attempt, first.resumed_from, second.attempt, second.resumed_from) == (1, None, 2, two.key)
    assert [one.parent, two.parent, three.parent] == [None, one.key, two.key]
    assert valid_commits(store) == [three, two, one]
    found, rejected = newest_restorable(store)
    assert found == (three, get_manifest(store, three.manifest))
    assert found[1].step == 3 and rejected == []
    assert [item.key for item in store.list("attempts/")] == ["attempts/000001.json", "attempts/000002.json"]
    assert store.list("commits/")[-1].key == "commits/0000000003-000002.json"


def test_what_a_commit_names_is_written_before_it(store: Store) -> None:
    class Ordered(Wrapper):
        def put(self, key: str, data: Buffer) -> None:
            written.append(key.partition("/")[0])
            super().put(key, data)

        def create(self, key: str, data: Buffer) -> None:
            written.append(key.partition("/")[0])
            super().create(key, data)

    written: list[str] = []
    train(Ordered(store), None, 1)
    assert written == ["attempts", *["blobs"] * 5, "manifests", "commits"]


def test_attempts_that_start_together_get_different_numbers(store: Store) -> None:
    class Overtaken(Wrapper):
        def create(self, key: str, data: Buffer) -> None:
            if not rivals:
                rivals.append(start_attempt(store, None))
            super().create(key, data)

    rivals: list[Attempt] = []
    mine = start_attempt(Overtaken(store), None)
    assert (rivals[0].attempt, mine.attempt) == (1, 2)
    with pytest.raises(Fenced):
        save(store, rivals[0], 1, None)
    save(store, mine, 1, None)


def test_a_start_that_is_always_overtaken_gives_up(store: Store) -> None:
    class AlwaysOvertaken(Wrapper):
        def create(self, key: str, data: Buffer) -> None:
            start_attempt(store, None)
            super().create(key, data)

    with pytest.raises(StoreError, match="in a row were started by others"):
        start_attempt(AlwaysOvertaken(store), None)


def test_a_lost_answer_is_not_a_rivals_win(store: Store) -> None:
    """The client of an object store retries a create that had succeeded, and reports that the key exists."""

    class Forgetful(Wrapper):
        def create(self, key: str, data: Buffer) -> None:
            super().create(key, data)
            super().create(key, data)

    forgetful = Forgetful(store)
    attempt, (one,) = train(forgetful, None, 1)
    assert attempt.attempt == 1
    assert valid_commits(store) == [one]


def test_a_commit_of_unknown_outcome_can_be_repeated(store: Store) -> None:
    class Silent(Wrapper):
        def create(self, key: str, data: Buffer) -> None:
            super().create(key, data)
            raise StoreError("the connection was reset")

    attempt = start_attempt(store, None)
    with pytest.raises(StoreError):
        save(Silent(store), attempt, 1, None)
    assert valid_commits(store) == [save(store, attempt, 1, None)]


def test_the_same_attempt_cannot_commit_a_step_twice_differently(store: Store) -> None:
    attempt, (one,) = train(store, None, 1)
    with pytest.raises(CheckpointError, match="exists with other content"):
        save(store, attempt, 1, None, payload="something else")
    assert valid_commits(store) == [one]


def test_a_store_that_cannot_create_once_cannot_hold_attempts(store: Store) -> None:
    class Careless(Wrapper):
        @property
        def promises(self) -> Promises:
            return super().promises._replace(create_once=False)

    with pytest.raises(ConfigError, match="at most once"):
        start_attempt(Careless(store), None)
    assert list(store.list("")) == []


def test_a_parent_out_of_line_is_refused_before_anything_is_committed(store: Store) -> None:
    _, (one, two) = train(store, None, 1, 2)
    attempt = start_attempt(store, one)
    for step, parent in [(3, None), (3, two), (1, one)]:
        with pytest.raises(CheckpointError, match="can't follow"):
            save(store, attempt, step, parent)
    assert len(store.list("commits/")) == 2


# Zombies


def test_a_zombie_is_fenced(store: Store) -> None:
    zombie, (one,) = train(store, None, 1)
    start_attempt(store, one)
    with pytest.raises(Fenced, match="attempt 1 is over: attempt 2 of this run has started"):
        save(store, zombie, 2, one)
    assert valid_commits(store) == [one]


def test_whoever_slept_before_its_attempt_began_does_not_begin_it(store: Store, tmp_path: Path) -> None:
    """It would take the run from the attempt that was started in its place, and drop what that has committed."""
    _, (one,) = train(store, None, 1)
    _, (two,) = train(store, one, 2)
    with pytest.raises(Fenced, match="attempt 2 of this run was started by another process meanwhile"):
        start_attempt(store, one, after=1)

    class Overtaken(Wrapper):
        def create(self, key: str, data: Buffer) -> None:
            start_attempt(store, two)
            super().create(key, data)

    with pytest.raises(Fenced, match="attempt 3"):
        start_attempt(Overtaken(store), one, after=2)
    assert valid_commits(store) == [two, one]

    class Slept(Wrapper):
        """Just after it has heard which attempts there are."""

        def list(self, prefix: str) -> Sequence[Item]:
            heard = super().list(prefix)
            if prefix == "attempts/" and len(heard) == 3:
                start_attempt(store, two)
            return heard

    with pytest.raises(Fenced, match="attempt 4"):
        start_attempt(Slept(store), one, after=3)
    # On another tier there may be more than the primary has heard of, as in a new run directory.
    empty = open_store(str(tmp_path / "empty"))
    tiers = Tiers([Tier("file", "", empty), Tier("s3", "", store)])
    assert start_attempt(tiers, two, after=0).attempt == 5


def test_a_zombie_of_a_run_directory_that_was_emptied_is_fenced(store: Store) -> None:
    zombie, _ = train(store, None)
    store.delete(zombie.key)
    reborn = start_attempt(store, None)
    assert reborn.attempt == zombie.attempt
    with pytest.raises(Fenced):
        save(store, zombie, 1, None)
    save(store, reborn, 1, None)


def test_a_zombie_that_slips_through_is_not_believed(store: Store) -> None:
    zombie, (one, two) = train(store, None, 1, 2)
    start_attempt(store, two)
    ghost = late(store, zombie, 3, two)
    found, (rejected,) = newest(store)
    assert found == two
    assert (rejected.key, rejected.step, rejected.attempt, rejected.abandoned) == (ghost.key, 3, 1, True)
    assert "later attempt resumed from step 2" in rejected.reason
    _, (three,) = train(store, two, 3)
    assert valid_commits(store) == [three, two, one]
    assert newest(store) == (three, [])  # ranks above the ghost, which is no longer worth a word


def test_a_zombie_cannot_keep_a_fresh_start_from_starting_fresh(store: Store) -> None:
    zombie = start_attempt(store, None)
    start_attempt(store, None)
    ghost = late(store, zombie, 1, None)
    found, rejected = newest(store)
    assert found is None
    assert [item.key for item in rejected] == [ghost.key]
    assert "not in the history" in rejected[0].reason


def test_steps_given_up_by_a_fallback_stay_given_up(store: Store) -> None:
    _, (_, two, three) = train(store, None, 1, 2, 3)
    flip_a_bit(store, three.key)
    assert newest(store)[0] == two
    start_attempt(store, two)
    store.delete(three.key)
    store.create(three.key, seal(three))
    found, rejected = newest(store)
    assert found == two and [item.key for item in rejected] == [three.key]


def test_of_two_histories_the_newest_attempts_counts(store: Store) -> None:
    _, (one, two) = train(store, None, 1, 2)
    train(store, one, 2, 3, 4)
    _, (three,) = train(store, two, 3)
    assert valid_commits(store) == [three, two, one]


# Which is the newest


def test_order_is_numeric(store: Store) -> None:
    _, commits = train(store, None, 9900, 10_000, 9_999_999_999, 10_000_000_000)
    assert valid_commits(store) == commits[::-1]
    assert commits[-1].key == "commits/10000000000-000001.json"


def test_names_that_are_not_commits_are_not_commits(store: Store) -> None:
    _, (one,) = train(store, None, 1)
    for name in ["5-1.json", "0000000005-1.json", "00000000005-000001.json", "latest", "a/0000000005-000001.json"]:
        store.put(f"commits/{name}", store.get(one.key))
    store.put("attempts/9.json", b"")
    assert newest(store) == (one, [])
    assert start_attempt(store, one).attempt == 2


DAMAGES: dict[str, Callable[[Store, str], None]] = {
    "bit": flip_a_bit,
    "cut": lambda store, key: store.put(key, store.get(key)[:-5]),
    "empty": lambda store, key: store.put(key, b""),
    "zeros": lambda store, key: store.put(key, bytes(len(store.get(key)))),
}


def _parts(store: Store, checkpoint: Commit) -> dict[str, str]:
    manifest = get_manifest(store, checkpoint.manifest)
    shard = manifest.entries["policy/parameters"].shards[1]
    position = manifest.entries["driver/position"].shards[0]
    assert shard.tensors and position.data
    return {
        "commit": checkpoint.key,
        "manifest": f"manifests/{checkpoint.manifest.digest}.json",
        "tensors": shard.tensors.key,
        "data": position.data.key,
    }


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("part", ["commit", "manifest", "tensors", "data"])
def test_what_is_damaged_is_passed_over_with_its_reason(store: Store, part: str, damage: str) -> None:
    _, (one, two) = train(store, None, 1, 2)
    key = _parts(store, two)[part]
    DAMAGES[damage](store, key)
    found, (rejected,) = newest(store)
    assert found == one
    assert (rejected.key, rejected.step, rejected.abandoned) == (two.key, 2, False)
    assert key in rejected.reason
    if damage in {"cut", "empty"}:  # the size tells
        assert newest(store, read_data=False)[0] == one


@pytest.mark.parametrize("part", ["manifest", "tensors", "data"])
@pytest.mark.parametrize("read_data", [True, False])
def test_what_is_missing_is_passed_over_with_its_reason(store: Store, part: str, read_data: bool) -> None:
    _, (one, two) = train(store, None, 1, 2)
    store.delete(_parts(store, two)[part])
    found, (rejected,) = newest(store, read_data)
    assert found == one and "missing" in rejected.reason


def test_data_is_not_read_where_it_need_not_be(store: Store) -> None:
    _, (_, two) = train(store, None, 1, 2)
    flip_a_bit(store, _parts(store, two)["tensors"])
    assert newest(store, read_data=False) == (two, [])


def test_damage_to_an_old_commit_does_not_touch_later_ones(store: Store) -> None:
    _, (one, two) = train(store, None, 1, 2)
    _, (three,) = train(store, two, 3)
    flip_a_bit(store, one.key)
    store.delete(two.key)  # as retention will
    assert newest(store) == (three, [])
    assert valid_commits(store) == [three]


def test_nothing_starts_from_the_beginning_when_nothing_restores(store: Store) -> None:
    _, (one, two) = train(store, None, 1, 2)
    flip_a_bit(store, one.key)
    store.delete(_parts(store, two)["tensors"])
    with pytest.raises(CheckpointError, match=f"(?s)none of 2 commits.*{two.key}: .*missing.*{one.key}: .*damaged"):
        newest_restorable(store)


def test_an_attempt_whose_record_is_damaged_counts_as_if_it_had_never_been(store: Store) -> None:
    _, (one,) = train(store, None, 1)
    second, (two,) = train(store, one, 2)
    flip_a_bit(store, second.key)
    found, (rejected,) = newest(store)
    assert found == one and (rejected.key, rejected.abandoned) == (two.key, False)
    assert attempt_key(2) in rejected.reason
    with pytest.raises(CheckpointError, match=attempt_key(2)):
        save(store, second, 3, two)  # nobody would believe it
    third, (again,) = train(store, one, 2)
    assert third.attempt == 3 and newest(store) == (again, [])


def test_a_lost_commit_that_was_resumed_from_is_damage(store: Store) -> None:
    _, (one,) = train(store, None, 1)
    start_attempt(store, one)
    store.delete(one.key)
    with pytest.raises(CheckpointError, match=f"{one.key} is missing"):
        newest_restorable(store)


def test_a_lost_attempt_record_is_damage_and_its_number_is_not_used_again(store: Store) -> None:
    first, (one,) = train(store, None, 1)
    store.delete(first.key)
    with pytest.raises(CheckpointError, match=f"{first.key} is missing"):
        newest_restorable(store)
    assert start_attempt(store, None).attempt == 2
    assert [type(found) for found in ranked_commits(store)] == [Rejected]
    assert one.attempt == 1


# Forgery and other formats


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"nonce": "0" * 32}, "does not belong to attempt 1"),
        ({"step": 5}, "does not belong to attempt 1"),
        ({"parent": None}, None),
        ({"parent": commit_key(2, 1)}, "does not belong to attempt 1"),
        ({"parent": commit_key(1, 7)}, "does not belong to attempt 1"),
    ],
)
def test_a_commit_whose_chain_does_not_hold_is_refused(
    store: Store, changes: dict[str, Any], complaint: str | None
) -> None:
    _, (one, two) = train(store, None, 1, 2)
    edit(store, two.key, **changes)
    found, rejected = newest(store)
    if complaint is None:  # what the first commit of a fresh attempt may say
        assert found and found.key == two.key
    else:
        assert found == one
        assert complaint in rejected[0].reason


def test_a_commit_cannot_name_the_manifest_of_another_step(store: Store) -> None:
    _, (one, two) = train(store, None, 1, 2)
    edit(store, two.key, manifest=one.manifest.model_dump())
    with pytest.raises(FormatError, match=r"its manifest is of step 1"):
        newest_restorable(store)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"version": 3},
        {"signature": {"key": "0" * 64, "value": "0" * 128}},
        {"surprise": 1},
        {"parent": "../../etc/passwd"},
        {"parent": "commits/../commits/0000000001-000001.json"},
        {"manifest": {"digest": "../" * 20 + "abcd", "size": 1}},
        {"manifest": {"digest": "ab", "size": 1}},
        {"manifest": {"digest": "a" * 64, "size": -1}},
    ],
)
def test_an_intact_record_of_another_kind_is_an_error_and_no_fallback(store: Store, changes: dict[str, Any]) -> None:
    _, (_, two) = train(store, None, 1, 2)
    edit(store, two.key, **changes)
    with pytest.raises(FormatError, match=two.key):
        newest_restorable(store)


@pytest.mark.parametrize("changes", [{"version": 2}, {"resumed_from": "../x"}, {"resumed_from": commit_key(1, 1)}])
def test_the_same_goes_for_attempts(store: Store, changes: dict[str, Any]) -> None:
    attempt, _ = train(store, None, 1)
    edit(store, attempt.key, **changes)
    with pytest.raises(FormatError, match=attempt.key):
        newest_restorable(store)


def test_a_foreign_commit_without_a_check_is_foreign(store: Store) -> None:
    train(store, None, 1)
    store.put(commit_key(2, 1), b'{"format":"other"}')
    with pytest.raises(FormatError, match="its format is 'other'"):
        newest_restorable(store)


def test_a_key_that_exists_unreadably_is_a_rivals(store: Store) -> None:
    attempt = start_attempt(store, None)
    store.create(commit_key(1, 1), b"garbage")
    with pytest.raises(CheckpointError, match="exists with other content"):
        save(store, attempt, 1, None)
    with pytest.raises(AlreadyExists):
        store.create(commit_key(1, 1), b"")
