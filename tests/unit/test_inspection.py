"""What `harness checkpoints`, `check`, `repair` and `prune` say about a run, and what they do to it. (diff:
test_comparison.py)"""

import fcntl
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from checkpointing.commit import Attempt, Commit, attempt_key, start_attempt
from checkpointing.errors import RunMismatch, StoreError
from checkpointing.events import CheckpointCommitted, CheckpointRejected, CheckpointsPruned, Evaluated
from checkpointing.history import newest_restorable, valid_commits
from checkpointing.inspection import overview
from checkpointing.journal import Journal, read_journal
from checkpointing.manifest import manifest_key
from checkpointing.replication import RUN_KEY, replicate
from checkpointing.retention import Keep
from checkpointing.settings import Checkpoints
from checkpointing.store import Item, Store, open_store
from checkpointing.stores import memory
from checkpointing.tiers import Tier, Tiers
from checkpointing.verification import READERS, check
from harness import supervisor
from harness.config import RunConfig
from harness.engines import EnginePool
from harness.runs import TIERS_KEY, find_run, leave_tiers

from .checkpoint_samples import Wrapper, blob_keys, flip, save, train
from .cli_samples import harness

GOLDEN = Path(__file__).parent / "golden" / "v1"


pytestmark = pytest.mark.usefixtures("unsynced")


class Sample(NamedTuple):
    """A run of steps 1, 2 (attempt 1), 3 and 4 (attempt 2), all of it on two tiers, file and file-2."""

    directory: Path
    near: Store
    far: Store
    attempt: Attempt
    commits: list[Commit]

    @property
    def name(self) -> str:
        return str(self.directory)

    @property
    def tiers(self) -> Tiers:
        return find_run(self.name).tiers

    def store(self, tier: str) -> Store:
        return self.tiers.tier(tier).store

    def files(self, tier: str) -> dict[str, bytes]:
        store = self.store(tier)
        return {item.key: store.get(item.key) for item in store.list("")}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sample:
    monkeypatch.setattr(memory, "RAM", tmp_path / "shm")
    directory, far = tmp_path / "run [red] ?*# é", tmp_path / "far [1] ?*# é"
    near, away = open_store(str(directory / "store")), open_store(str(far))
    leave_tiers(directory, Checkpoints(tiers=("memory://", "file://", f"file://{far}")))
    near.create(RUN_KEY, b'{"run_id":"a"}')
    _, first = train(near, None, 1, 2)
    attempt, second = train(near, first[-1], 3, 4)
    for found in [*first, *second]:
        replicate(near, away, None, found)
    return Sample(directory, near, away, attempt, [*first, *second])


def truncate(store: Store, key: str) -> None:
    store.put(key, store.get(key)[:-1])


def delete(store: Store, key: str) -> None:
    store.delete(key)


def own_blob(run: Sample, index: int) -> str:
    """A blob that only this commit names."""
    others = {key for found in run.commits for key in blob_keys(run.near, found) if found != run.commits[index]}
    return next(key for key in blob_keys(run.near, run.commits[index]) if key not in others)


KEYS: dict[str, Callable[[Sample], str]] = {
    "blob": lambda run: own_blob(run, 3),
    "shared blob": lambda run: next(
        iter({*blob_keys(run.near, run.commits[3])} & {*blob_keys(run.near, run.commits[0])})
    ),
    "old blob": lambda run: own_blob(run, 0),
    "manifest": lambda run: manifest_key(run.commits[3].manifest),
    "attempt": lambda run: attempt_key(1),
    "newest attempt": lambda run: attempt_key(2),
    "commit": lambda run: run.commits[3].key,
}


# check and repair


def test_a_checkpoint_of_version_1_is_whole(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "store")
    assert harness("check", tmp_path, "--read-data").code == 0
    said = harness("check", f"file://{tmp_path / 'store'}", "--read-data")
    assert said.code == 0 and "file: 3 of 3 checkpoints whole; restores step 3 by itself" in said.out
    assert "can resume from step 3 (every byte was read)" in said.out


def test_a_whole_run_is_left_as_it_is(run: Sample) -> None:
    before = run.files("file"), run.files("file-2")
    said = harness("check", run.name, "--read-data")
    assert said.code == 0 and "can resume from step 4" in said.out
    assert harness("repair", run.name, "--read-data").code == 0
    assert (run.files("file"), run.files("file-2")) == before


HARMS = [(what, harm, tier) for what in KEYS for harm in (flip, truncate, delete) for tier in ("file", "file-2")]
HARMS.remove(("commit", delete, "file-2"))  # that one was never carried there, for all anyone can tell


@pytest.mark.parametrize(("what", "harm", "tier"), HARMS)
def test_damage_on_one_tier_is_found_and_repaired(
    run: Sample, what: str, harm: Callable[[Store, str], None], tier: str
) -> None:
    before, key = run.files(tier), KEYS[what](run)
    harm(run.store(tier), key)
    said = harness("check", run.name, "--read-data", "--json")
    found = json.loads(said.out)
    other = {"file": "file-2", "file-2": "file"}[tier]
    assert said.code == found["exit_code"] == 22
    assert (found["newest"], found["restores"], found["reason"]) == (4, 4, None)
    assert [(one["tier"], one["key"], one["elsewhere"]) for one in found["damages"]] == [(tier, key, [other])]
    assert found["damages"][0]["needed_by"]
    said = harness("check", run.name, "--tier", tier, "--read-data")
    assert said.code == 22 and key in said.out and f"whole on {other}" in said.out
    assert harness("check", run.name, "--tier", other, "--read-data").code == 0
    said = harness("repair", run.name, "--tier", tier, "--read-data")
    assert said.code == 0 and key in said.out
    assert harness("check", run.name, "--read-data").code == 0
    assert run.files(tier) == before


def test_only_reading_finds_a_flipped_bit(run: Sample) -> None:
    flip(run.far, own_blob(run, 3))
    assert harness("check", run.name).code == 0
    assert harness("repair", run.name).code == 0
    assert harness("check", run.name, "--read-data").code == 22


@pytest.mark.parametrize("harm", [flip, truncate, delete])
@pytest.mark.parametrize("what", ["blob", "manifest", "newest attempt"])
def test_the_newest_damaged_everywhere(run: Sample, what: str, harm: Callable[[Store, str], None]) -> None:
    key = KEYS[what](run)
    for store in (run.near, run.far):
        harm(store, key)
    said = harness("check", run.name, "--read-data")
    assert said.code == 12
    assert "the newest checkpoint, step 4, can't be restored" in said.out and key in said.out
    assert "can resume from step 2" in said.out if what == "newest attempt" else "can resume from step 3" in said.out
    best, _ = newest_restorable(run.tiers)
    assert best and f"can resume from step {best[0].step}" in said.out
    said = harness("repair", run.name, "--read-data")
    assert said.code == 12 and "the newest checkpoint, step 4, can't be restored" in said.out
    assert key in said.out


def test_an_older_one_damaged_everywhere(run: Sample) -> None:
    key = own_blob(run, 0)
    for store in (run.near, run.far):
        delete(store, key)
    said = harness("check", run.name)
    assert said.code == 22 and f"`harness repair {run.name}`" in said.out
    assert "needed by step 1; whole on no other tier" in said.out
    assert "can resume from step 4" in said.out and "puts back 0 of 2" in said.out
    said = harness("repair", run.name)
    assert said.code == 22 and f"lost: {key}" in said.out


def test_each_tier_can_lack_another_part(run: Sample) -> None:
    """No tier restores the newest by itself; together they do, and repair makes both whole."""
    delete(run.near, own_blob(run, 3))
    delete(run.far, manifest_key(run.commits[3].manifest))
    found = json.loads(harness("check", run.name, "--json").out)
    assert (found["exit_code"], found["restores"]) == (22, 4)
    assert [one["restores"] for one in found["tiers"]] == [3, 3]
    assert harness("repair", run.name).code == 0
    found = json.loads(harness("check", run.name, "--json").out)
    assert (found["exit_code"], [one["restores"] for one in found["tiers"]]) == (0, [4, 4])


def test_nothing_restores(run: Sample) -> None:
    for store in (run.near, run.far):
        for item in store.list("blobs/"):
            store.delete(item.key)
    said = harness("check", run.name)
    assert said.code == 12 and "nothing can be restored" in said.out


def test_a_run_without_a_checkpoint_has_nothing_to_resume_from(tmp_path: Path) -> None:
    start_attempt(open_store(str(tmp_path / "store")), None)
    said = harness("check", tmp_path)
    assert said.code == 12 and "no checkpoint" in said.out
    assert harness("checkpoints", tmp_path).code == 0


def test_a_nodes_memory_counts_as_a_copy(run: Sample) -> None:
    key = own_blob(run, 3)
    run.store("memory").put(key, run.near.get(key))
    for store in (run.near, run.far):
        flip(store, key)
    said = harness("check", run.name, "--read-data")
    assert said.code == 22 and "whole on memory" in said.out
    assert harness("repair", run.name, "--read-data").code == 0
    assert harness("check", run.name, "--read-data").code == 0
    assert harness("check", run.name, "--tier", "memory").code == 10


def test_the_primary_has_lost_the_newest_commits(run: Sample) -> None:
    for found in run.commits[2:]:
        delete(run.near, found.key)
    said = harness("check", run.name)
    assert said.code == 22 and f"file: {run.commits[2].key}" in said.out
    assert harness("repair", run.name).code == 0
    assert harness("check", run.name).code == 0


def test_what_is_not_carried_yet_is_no_damage(run: Sample) -> None:
    save(run.near, run.attempt, 5, run.commits[-1], "more")
    said = harness("check", run.name, "--read-data")
    assert said.code == 0 and "can resume from step 5" in said.out
    assert "file-2: 4 of 4 checkpoints whole; restores step 4 by itself" in said.out


def test_the_run_record_is_checked(run: Sample) -> None:
    truncate(run.far, RUN_KEY)
    said = harness("check", run.name)
    assert said.code == 22 and f"file-2: {RUN_KEY}: can't be read; whole on file" in said.out
    assert harness("repair", run.name).code == 0
    delete(run.near, RUN_KEY)
    assert harness("check", run.name).code == 22
    assert harness("repair", run.name).code == 0
    assert harness("check", run.name).code == 0
    run.far.put(RUN_KEY, b'{"run_id":"b"}')
    before = run.files("file"), run.files("file-2")
    for command in ("check", "repair"):
        assert harness(command, run.name).code == RunMismatch.exit_code
    assert (run.files("file"), run.files("file-2")) == before


class Down(Wrapper):
    def list(self, prefix: str) -> Sequence[Item]:
        raise StoreError("it is down")


class Unreadable(Wrapper):
    def get(self, key: str) -> bytes:
        if key.startswith("blobs/"):
            raise StoreError("it is down")
        return super().get(key)


@pytest.mark.parametrize("kind", [Down, Unreadable])
def test_a_tier_that_cannot_be_read_is_neither_whole_nor_damaged(run: Sample, kind: type[Wrapper]) -> None:
    tiers = Tiers([Tier("file", "", run.near), Tier("s3", "", kind(run.far))])
    found = check(tiers, read_data=True)
    assert found.exit_code == StoreError.exit_code and found.restores == 4
    assert found.tiers[1].refused == "it is down"
    seen = overview(tiers)
    assert [one.tiers for one in seen.checkpoints] == [("file",) if kind is Down else ("file", "s3")] * 4
    assert seen.refused == ({"s3": "it is down"} if kind is Down else {})
    assert not any("s3" in reason for one in seen.checkpoints for reason in one.needed_by)


def test_each_blob_is_read_once_and_few_at_a_time(run: Sample) -> None:
    class Counting(Wrapper):
        """Lets nobody read before as many do as may."""

        def __init__(self, store: Store) -> None:
            super().__init__(store)
            self.reading, self.most, self.read = 0, 0, list[str]()
            self.lock, self.full = threading.Lock(), threading.Event()

        def get(self, key: str) -> bytes:
            if not key.startswith("blobs/"):
                return super().get(key)
            with self.lock:
                self.read.append(key)
                self.reading += 1
                self.most = max(self.most, self.reading)
            if self.reading >= READERS:
                self.full.set()
            self.full.wait()
            data = super().get(key)
            with self.lock:
                self.reading -= 1
            return data

    store = Counting(run.near)
    assert check(Tiers([Tier("file", "", store)]), read_data=True).exit_code == 0
    assert sorted(store.read) == sorted({key for found in run.commits for key in blob_keys(run.near, found)})
    assert store.most == READERS
    store.read.clear()
    assert check(Tiers([Tier("file", "", store)])).exit_code == 0
    assert store.read == []


class Meanwhile(Wrapper):
    """Something else happens to the tier before its blobs are listed."""

    def __init__(self, store: Store, happens: Callable[[], object]) -> None:
        super().__init__(store)
        self._happens: Callable[[], object] | None = happens

    def list(self, prefix: str) -> Sequence[Item]:
        if prefix == "blobs/" and self._happens:
            happens, self._happens = self._happens, None
            happens()
        return super().list(prefix)


def test_what_is_pruned_meanwhile_is_no_damage(run: Sample) -> None:
    def prune() -> None:
        for key in (run.commits[0].key, own_blob(run, 0)):
            run.far.delete(key)

    gone = own_blob(run, 0)
    tiers = Tiers([Tier("file", "", run.near), Tier("s3", "", Meanwhile(run.far, prune))])
    found = check(tiers)
    assert (found.exit_code, found.damages) == (0, ())
    assert gone not in {item.key for item in run.far.list("blobs/")}


def test_what_is_saved_meanwhile_is_no_damage(run: Sample) -> None:
    near = Meanwhile(run.near, lambda: save(run.near, run.attempt, 5, run.commits[-1], "more"))
    found = check(Tiers([Tier("file", "", near), Tier("s3", "", run.far)]))
    assert (found.exit_code, found.newest) == (0, 4)


def test_repair_waits_for_nobody_who_is_at_work(run: Sample) -> None:
    key = own_blob(run, 3)
    delete(run.near, key)
    with (run.directory / "supervisor.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = harness("repair", run.name)
        assert said.code == 10 and "is working on this run" in said.err
        assert harness("prune", run.name, "--tier", "file", "--newest", 1).code == 10
        assert harness("prune", run.name, "--tier", "file", "--newest", 1, "--dry-run").code == 0
        assert harness("check", run.name).code == 22
        assert len(valid_commits(run.near)) == 4


# checkpoints


def test_the_checkpoints_of_a_run(run: Sample) -> None:
    journal = Journal(run.directory, "driver", 2)
    journal.append(CheckpointCommitted(step=4, commit=run.commits[3].key, bytes_total=0, seconds=0))
    journal.close()
    _, later = train(run.near, run.commits[2], 4, 5)
    # Step 4 of attempt 2 is abandoned by now, and steps 4 and 5 of attempt 3 are not on the far tier.
    seen = json.loads(harness("checkpoints", run.name, "--json").out)
    rows = seen["checkpoints"]
    assert [(one["step"], one["attempt"], one["validity"]) for one in rows] == [
        (5, 3, "valid"), (4, 3, "valid"), (4, 2, "abandoned"), (3, 2, "valid"), (2, 1, "valid"), (1, 1, "valid")
    ]  # fmt: skip
    assert [one["tiers"] for one in rows] == [["file"]] * 2 + [["file", "file-2"]] * 4
    assert [one["needed_by"] for one in rows] == [
        ["newest", "not on file-2 yet"], ["not on file-2 yet"], [],
        ["resumed from by attempt 3", "newest on file-2"], [], [],
    ]  # fmt: skip
    assert rows[2]["reason"] == "a later attempt resumed from step 3"
    assert (seen["newest_local"], seen["newest_durable"], seen["behind"]) == (5, 3, 2)
    assert rows[2]["committed"] and not rows[0]["committed"]
    sizes = {item.key: item.size for item in run.near.list("blobs/")}
    keys = [set(blob_keys(run.near, found)) for found in (run.commits[3], later[0])]
    assert rows[0]["bytes_total"] == sum(sizes[key] for key in blob_keys(run.near, later[1]))
    assert rows[0]["bytes_new"] == sum(sizes[key] for key in set(blob_keys(run.near, later[1])) - keys[1])
    assert rows[-1]["bytes_new"] == rows[-1]["bytes_total"]
    said = harness("checkpoints", run.name)
    assert said.code == 0 and "newest local: step 5; newest durable: step 3; lag: 2 checkpoints, 2 steps" in said.out
    assert len([line for line in said.out.splitlines() if "valid" in line or "abandoned" in line]) == 7


def test_why_a_checkpoint_was_rejected(run: Sample) -> None:
    journal = Journal(run.directory, "driver", 2)
    journal.append(CheckpointRejected(step=4, commit=run.commits[3].key, reason="rank 1 said no"))
    journal.close()
    start_attempt(run.near, run.commits[2])
    assert "a later attempt resumed from step 3; rank 1 said no" in harness("checkpoints", run.name).out


def test_a_damaged_checkpoint_is_shown_as_one(run: Sample) -> None:
    blob = own_blob(run, 3)
    for store in (run.near, run.far):
        truncate(store, blob)
        flip(store, manifest_key(run.commits[1].manifest))
        flip(store, run.commits[0].key)
    seen = overview(run.tiers)
    assert [one.validity for one in seen.checkpoints] == ["damaged", "valid", "damaged", "damaged"]
    assert blob in str(seen.checkpoints[0].reason)
    assert [one.tiers for one in seen.checkpoints] == [(), ("file", "file-2"), (), ()]
    assert [one.bytes_new is None for one in seen.checkpoints] == [False, True, True, True]
    assert (seen.newest_local, seen.newest_durable) == (3, 3)


def test_a_tier_that_lacks_a_part_is_not_named(run: Sample) -> None:
    delete(run.far, own_blob(run, 3))
    flip(run.near, manifest_key(run.commits[2].manifest))
    seen = overview(run.tiers)
    assert [one.tiers for one in seen.checkpoints[:2]] == [("file",), ("file-2",)]
    assert [one.validity for one in seen.checkpoints] == ["valid"] * 4
    assert (seen.newest_local, seen.newest_durable, seen.behind) == (4, 3, 1)
    delete(run.far, run.commits[2].key)
    assert overview(run.tiers).checkpoints[1].tiers == ()
    delete(run.far, attempt_key(1))
    assert [one.tiers for one in overview(run.tiers).checkpoints[2:]] == [("file",)] * 2


def test_what_a_policy_keeps(run: Sample) -> None:
    seen = overview(run.tiers, {"file": Keep(newest=1, every=1)})
    assert seen.checkpoints[-1].needed_by == ("kept on file",)
    assert seen.checkpoints[0].needed_by == ("newest",)
    assert overview(run.tiers, {"file": Keep(newest=1)}).checkpoints[-1].needed_by == ()


def test_reading_writes_nothing(run: Sample) -> None:
    def everything() -> set[Path]:
        return set(run.directory.rglob("*"))

    before = everything()
    for command in (
        ["checkpoints"],
        ["check", "--read-data"],
        ["prune", "--tier", "file", "--newest", "1", "--dry-run"],
    ):
        assert harness(command[0], run.name, *command[1:]).code == 0
    assert everything() == before


# prune


def sizes(store: Store) -> int:
    return sum(item.size for item in store.list(""))


def test_prune_frees_what_the_dry_run_says(run: Sample) -> None:
    before = sizes(run.near), run.files("file-2")
    policy = ("prune", run.name, "--tier", "file", "--newest", 1)
    said = harness(*policy, "--dry-run")
    assert said.code == 0 and "steps 1, 3," in said.out and sizes(run.near) == before[0]
    freed = said.out.partition("would free ")[2]
    done = harness(*policy)
    assert done.code == 0 and done.out.partition("freed ")[2] == freed
    assert [found.step for found in valid_commits(run.near)] == [4, 2]  # 2 is what attempt 2 resumed from
    events = [record.event for record in read_journal(run.directory)]
    assert events == [
        CheckpointsPruned(
            tier="file",
            commits=[run.commits[0].key, run.commits[2].key],
            bytes_freed=before[0] - sizes(run.near),
        )
    ]
    assert run.files("file-2") == before[1]
    assert harness("check", run.name, "--read-data").code == 0
    assert "freed 0 bytes: no checkpoint, 0 blobs" in harness(*policy).out


def test_prune_spares_what_is_not_on_the_next_tier(run: Sample) -> None:
    parent = run.commits[-1]
    for step in range(5, 12):
        parent = save(run.near, run.attempt, step, parent, f"step {step}")
    assert harness("prune", run.name, "--tier", "file", "--newest", 1).code == 0
    assert [found.step for found in valid_commits(run.near)] == [*range(11, 4, -1), 2]


def test_prune_by_the_policy_of_the_run_and_by_metric(run: Sample) -> None:
    assert "keeps everything" in harness("prune", run.name, "--tier", "file").err
    best = ("prune", run.name, "--tier", "file", "--best", "score", "--dry-run")
    assert "has no such metric" in harness(*best).err
    journal = Journal(run.directory, "driver", 1)
    journal.append(Evaluated(step=1, metrics={"score": 9.0}))
    journal.close()
    assert "step 3," in harness(*best).out
    urls = ("file://", run.tiers.tier("file-2").url)
    leave_tiers(run.directory, Checkpoints(tiers=urls, keep={"file": Keep(newest=3)}))
    assert "step 1," in harness("prune", run.name, "--tier", "file", "--dry-run").out
    assert "steps 1, 3," in harness("prune", run.name, "--tier", "file", "--newest", 1, "--dry-run").out
    assert "no checkpoint," in harness("prune", run.name, "--tier", "file", "--every", 1, "--dry-run").out


def test_prune_refuses_what_it_cannot_judge(run: Sample) -> None:
    def refused(name: object, tier: str) -> str:
        said = harness("prune", name, "--tier", tier, "--newest", 1)
        assert said.code == 10
        return said.err

    assert "name the run directory" in refused(f"file://{run.directory}/store", "file")
    assert "no tier 's3'" in refused(run.name, "s3")
    assert "memory" in refused(run.name, "memory")
    start_attempt(run.near, run.commits[-1])
    assert "has not heard of attempt 3" in refused(run.name, "file-2")
    assert len(valid_commits(run.far)) == 4


# RUN


@pytest.mark.parametrize("command", ["checkpoints", "check", "repair", "diff", "prune"])
def test_a_wrong_run_is_an_error(tmp_path: Path, command: str) -> None:
    rest = {"diff": ("1", "2"), "prune": ("--tier", "file")}.get(command, ())
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "nowhere", tmp_path, tmp_path / "file", f"file://{tmp_path}/nowhere", "ftp://x/y"):
        said = harness(command, wrong, *rest)
        assert said.code == 10 and said.err.startswith("error: ") and said.err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


def test_a_run_on_s3(run: Sample, s3_url: str) -> None:
    leave_tiers(run.directory, Checkpoints(tiers=("file://", s3_url)))
    assert "not on s3 yet" in harness("checkpoints", run.name).out
    assert harness("repair", run.name, "--tier", "s3").code == 0
    assert harness("check", s3_url, "--read-data").code == harness("check", run.name, "--read-data").code == 0
    assert harness("diff", s3_url, 3, 3).code == harness("checkpoints", s3_url).code == 0
    truncate(open_store(s3_url), own_blob(run, 3))
    assert harness("check", s3_url).code == 12
    said = harness("check", run.name)
    assert said.code == 22 and "s3: blobs/" in said.out and "whole on file" in said.out


def test_a_run_directory_can_be_moved(run: Sample) -> None:
    moved = run.directory.rename(run.directory.with_name("moved"))
    assert harness("check", moved).code == 0
    assert [tier.name for tier in find_run(str(moved)).tiers.all] == ["memory", "file", "file-2"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"urls": []}', '{"urls": ["ftp://x"]}', '{"urls": "file://"}'])
def test_a_damaged_list_of_tiers_is_an_error(run: Sample, content: str) -> None:
    (run.directory / TIERS_KEY).write_text(content)
    said = harness("check", run.name)
    assert said.code == 10 and said.err.startswith("error: ")


def test_the_supervisor_leaves_the_list_of_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor._Supervisor, "_one_more", lambda *args: True)
    checkpoints = Checkpoints(tiers=("file://", f"file://{tmp_path}/far"), keep={"file": Keep(newest=2)})
    config = RunConfig(run_dir=tmp_path / "run", device="cpu", checkpoints=checkpoints, skyrl={})
    supervisor.supervise(config, EnginePool(config, config.run_dir / "logs"))
    start_attempt(open_store(str(tmp_path / "run" / "store")), None)
    found = find_run(str(tmp_path / "run"))
    assert [tier.url for tier in found.tiers.all] == checkpoints.urls(tmp_path / "run")
    assert found.keep == checkpoints.keep
