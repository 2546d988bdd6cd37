"""Tiers read as one store: the nearest whole copy wins, and a tier that can't be asked is no proof of absence."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from checkpointing.blobs import Blob, get_blob, put_blob, require_present
from checkpointing.commit import start_attempt
from checkpointing.errors import ConfigError, CorruptBlob, KeyMissing, StoreError
from checkpointing.history import newest_restorable
from checkpointing.retention import Keep
from checkpointing.settings import Checkpoints
from checkpointing.store import Item, Store, open_store
from checkpointing.stores import memory
from checkpointing.tiers import Tier, Tiers

from .checkpoint_samples import Wrapper, save


class Down(Wrapper):
    def get(self, key: str) -> bytes:
        raise StoreError("s3 is down")

    def list(self, prefix: str) -> Sequence[Item]:
        raise StoreError("s3 is down")


@pytest.fixture
def stores(tmp_path: Path) -> dict[str, Store]:
    return {name: open_store(str(tmp_path / name)) for name in ("near", "far")}


def tiers_of(stores: dict[str, Store]) -> Tiers:
    return Tiers([Tier(name, name, store) for name, store in stores.items()])


@pytest.fixture
def tiers(stores: dict[str, Store]) -> Tiers:
    return tiers_of(stores)


@pytest.fixture
def ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(memory, "RAM", tmp_path / "shm")
    yield tmp_path / "shm"


def test_writing_goes_to_the_primary_alone(tiers: Tiers, stores: dict[str, Store]) -> None:
    tiers.put("a", b"1")
    tiers.create("b", b"2")
    assert [item.key for item in stores["near"].list("")] == ["a", "b"]
    assert stores["far"].list("") == []
    tiers.delete("a")
    assert [item.key for item in tiers.list("")] == ["b"]


def test_reading_asks_every_tier(tiers: Tiers, stores: dict[str, Store]) -> None:
    stores["far"].put("only/far", b"1")
    stores["near"].put("only/near", b"22")
    assert tiers.get("only/far") == b"1"
    assert tiers.list("only/") == [Item("only/far", 1), Item("only/near", 2)]
    with pytest.raises(KeyMissing, match="near, far"):
        tiers.get("nowhere")


@pytest.mark.parametrize("damage", [b"x" * 4, b"da", None])
def test_a_bad_copy_is_passed_over(tiers: Tiers, stores: dict[str, Store], damage: bytes | None) -> None:
    blob = Blob.of(b"data")
    put_blob(stores["far"], b"data")
    if damage is not None:
        stores["near"].put(blob.key, damage)
    assert get_blob(tiers, blob) == b"data"
    require_present(tiers, blob)
    stores["far"].put(blob.key, b"DATA")
    with pytest.raises(CorruptBlob, match=r"\(far\)"):
        get_blob(tiers, blob)


def test_a_record_that_is_damaged_near_is_read_from_far(tiers: Tiers, stores: dict[str, Store]) -> None:
    attempt = start_attempt(tiers, None)
    made = save(stores["near"], attempt, 1, None)
    for item in stores["near"].list(""):
        stores["far"].put(item.key, stores["near"].get(item.key))
        stores["near"].put(item.key, b"{")
    found, rejected = newest_restorable(tiers)
    assert found and found[0] == made and rejected == []


def test_a_tier_that_is_down_stops_no_run_that_the_primary_knows(stores: dict[str, Store]) -> None:
    attempt = start_attempt(stores["near"], None)
    made = save(stores["near"], attempt, 1, None)
    found, _ = newest_restorable(tiers_of(stores | {"far": Down(stores["far"])}))
    assert found and found[0] == made


def test_nothing_starts_from_the_beginning_while_a_tier_that_may_know_the_run_is_down(stores: dict[str, Store]) -> None:
    """A fresh file system and an object store that is not reachable: the run is there, not new."""
    down = tiers_of(stores | {"far": Down(stores["far"])})
    for act in (lambda: newest_restorable(down), lambda: start_attempt(down, None), lambda: down.get("run.json")):
        with pytest.raises(StoreError, match="s3 is down"):
            act()


def test_attempts_count_over_all_tiers(tiers: Tiers, stores: dict[str, Store]) -> None:
    """A run that is moved to another cluster with its object store alone goes on counting."""
    for _ in range(3):
        start_attempt(stores["far"], None)
    assert start_attempt(tiers, None).attempt == 4
    assert [item.key for item in stores["near"].list("")] == ["attempts/000004.json"]


def test_names_and_kinds(ram: Path, tmp_path: Path) -> None:
    tiers = Tiers.open(["memory://run", f"file://{tmp_path}/a", f"file://{tmp_path}/b"])
    assert [tier.name for tier in tiers.all] == ["memory", "file", "file-2"]
    assert [tier.name for tier in tiers.memory] == ["memory"]
    assert tiers.primary.name == "file" and tiers.tier("file-2").url.endswith("/b")
    with pytest.raises(ConfigError, match="no tier 's3'"):
        tiers.tier("s3")
    for url in (f"fsspec+file://{tmp_path}/c", "fsspec+memory://c"):
        with pytest.raises(ConfigError, match="can't be a tier"):
            Tiers.open([f"file://{tmp_path}/a", url])
    with pytest.raises(ConfigError, match="none of them is durable"):
        Tiers.open(["memory://run"])


def test_memory_belongs_to_a_node(ram: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_NODE", "one")
    open_store("memory://run").put("a", b"1")
    assert open_store("memory://run").get("a") == b"1"
    assert open_store("memory://other").list("") == []
    monkeypatch.setenv("HARNESS_NODE", "two")
    assert open_store("memory://run").list("") == []
    with pytest.raises(ConfigError, match="memory://"):
        open_store("memory://../up")


def test_settings_name_the_tiers_of_a_run(tmp_path: Path) -> None:
    assert Checkpoints().urls(tmp_path) == [f"file://{tmp_path}/store"]
    urls = Checkpoints(tiers=("memory://", "file://", "s3://bucket/run")).urls(tmp_path)
    assert urls[0].startswith("memory://") and urls[1:] == [f"file://{tmp_path}/store", "s3://bucket/run"]
    assert urls[0] != Checkpoints(tiers=("memory://", "file://")).urls(tmp_path / "other")[0]


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Checkpoints.from_environment() == Checkpoints()
    monkeypatch.setenv("HARNESS_CHECKPOINTS", '{"tiers": ["memory://", "file://"], "keep": {"file": {"newest": 2}}}')
    assert Checkpoints.from_environment().keep["file"].newest == 2
    for wrong, complaint in [("{", "JSON"), ('{"tier": []}', "tier"), ('{"keep": {"file": {"newest": 0}}}', "newest")]:
        monkeypatch.setenv("HARNESS_CHECKPOINTS", wrong)
        with pytest.raises(ConfigError, match=f"HARNESS_CHECKPOINTS: .*{complaint}"):
            Checkpoints.from_environment()
    with pytest.raises(ConfigError, match="no tier 's3'"):
        Checkpoints(keep={"s3": Keep(newest=1)}).open(tmp_path)
