"""How two checkpoints differ: what is said is right to the element, and what is equal is not read."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing import comparison
from checkpointing.blobs import put_blob
from checkpointing.canonical import canonical_json
from checkpointing.commit import commit, start_attempt
from checkpointing.comparison import Side, TensorDifference, compare
from checkpointing.manifest import Entry, Manifest, Shard
from checkpointing.store import Store, open_store
from checkpointing.tensors import pack_tensors, tensor_digest
from checkpointing.tiers import Tier, Tiers

from .cli_samples import harness

Rank = tuple[dict[str, torch.Tensor], Any]
"""What a rank holds of an entry: tensors, and the rest as JSON."""


pytestmark = pytest.mark.usefixtures("unsynced")


def shard(store: Store, rank: int, tensors: dict[str, torch.Tensor], data: Any) -> Shard:
    return Shard(
        rank=rank,
        tensors=put_blob(store, pack_tensors(tensors)) if tensors else None,
        data=put_blob(store, canonical_json(data)),
        tensor_digests={name: tensor_digest(tensor) for name, tensor in tensors.items()},
    )


def manifest(store: Store, step: int, **entries: list[Rank]) -> Manifest:
    """Entries of the policy, by name; a list of what each rank holds."""
    made = {
        f"policy/{name}": Entry.of(f"policy/{name}", [shard(store, rank, *held) for rank, held in enumerate(ranks)])
        for name, ranks in entries.items()
    }
    ranks = len(next(iter(entries.values())))
    return Manifest(step=step, topology={"policy": ranks}, entries=made, run={})


def tensors_differ(store: Store, a: torch.Tensor, b: torch.Tensor) -> TensorDifference:
    tiers = Tiers([Tier("file", "", store)])
    sides = [Side(tiers, manifest(store, 1, weights=[({"w": tensor}, None)])) for tensor in (a, b)]
    found = compare(*sides)
    return found.entries[0].tensors[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_how_much_a_tensor_differs(store: Store, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "CHUNK", 4)
    a = torch.arange(10, dtype=dtype).reshape(2, 5)
    b = a.clone()
    b[0, 1] += 3
    b[1, 4] -= 4
    found = tensors_differ(store, a, b)
    assert (found.rank, found.name, found.elements, found.differing, found.max_abs) == (0, "w", 10, 2, 4.0)
    assert found.relative_l2 == pytest.approx(5 / math.sqrt(sum(n * n for n in range(10))))


def test_bits_decide(store: Store) -> None:
    nan, inf = math.nan, math.inf
    a, b = torch.tensor([0.0, nan, inf, 1.0]), torch.tensor([-0.0, nan, inf, 1.0])
    found = tensors_differ(store, a, b)
    assert (found.differing, found.max_abs) == (1, 0.0)
    found = tensors_differ(store, a, torch.tensor([0.0, nan, inf, nan]))
    assert found.differing == 1 and math.isnan(found.max_abs or 0)
    found = tensors_differ(store, a, torch.tensor([0.0, nan, -inf, 1.0]))
    assert (found.differing, found.max_abs) == (1, inf)
    found = tensors_differ(store, torch.zeros(2), torch.tensor([3.0, 4.0]))
    assert (found.max_abs, found.relative_l2) == (4.0, inf)
    found = tensors_differ(store, torch.tensor([True, False]), torch.tensor([True, True]))
    assert (found.differing, found.max_abs) == (1, 1.0)
    found = tensors_differ(store, torch.tensor(1.0), torch.tensor(2.0))
    assert (found.elements, found.differing, found.relative_l2) == (1, 1, 1.0)


def test_a_nan_in_an_early_chunk_is_not_lost(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "CHUNK", 1)
    found = tensors_differ(store, torch.zeros(3), torch.tensor([math.nan, 1.0, 2.0]))
    assert found.differing == 3 and math.isnan(found.max_abs or 0) and math.isnan(found.relative_l2 or 0)


def test_other_shapes_and_dtypes_are_not_measured(store: Store) -> None:
    found = tensors_differ(store, torch.zeros(2, 3), torch.zeros(3, 2))
    assert (found.shapes, found.differing, found.max_abs) == (((2, 3), (3, 2)), None, None)
    found = tensors_differ(store, torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
    assert (found.dtypes, found.differing) == (("float32", "bfloat16"), None)


def test_entries_tensors_and_keys_that_differ(store: Store, tmp_path: Path) -> None:
    one, two = torch.ones(2), torch.tensor([1.0, 3.0])
    same: list[Rank] = [({"s": one}, {"x": 1})] * 2
    first: list[Rank] = [({"w": one, "v": one}, {"a": {"b": 1, "c": [1, 2]}, "z": 0.0}), ({"w": one}, {"a": 1})]
    then: list[Rank] = [({"w": two, "v": one}, {"a": {"b": 1, "c": [2, 1]}, "z": -0.0}), ({"u": one}, {"a": True})]
    attempt = start_attempt(store, None)
    before = commit(store, attempt, manifest(store, 1, same=same, changed=first, gone=same), None)
    commit(store, attempt, manifest(store, 2, same=same, changed=then, new=same), before)
    # What is equal is not read: its bytes need not even be there.
    store.delete(shard(store, 0, *same[0]).tensors.key)  # type: ignore[union-attr]
    said = harness("diff", tmp_path, 1, 2, "--json")
    found = json.loads(said.out)
    assert said.code == 0 and found["steps"] == [1, 2] and found["equal"] == ["policy/same"]
    changed, gone, new = found["entries"]
    assert (changed["name"], changed["equal"]) == ("policy/changed", 1)
    assert changed["data"] == ["rank 0: a.c", "rank 0: z", "rank 1: a"]
    assert [(one["rank"], one["name"], one["differing"], one["shapes"]) for one in changed["tensors"]] == [
        (0, "w", 1, [[2], [2]]), (1, "u", None, [None, [2]]), (1, "w", None, [[2], None])
    ]  # fmt: skip
    assert (gone["name"], gone["ranks"], new["name"], new["ranks"]) == ("policy/gone", [2, 0], "policy/new", [0, 2])
    said = harness("diff", tmp_path, 1, 2)
    assert said.code == 0 and "3 entries differ, 1 are bit-identical" in said.out
    row = next(line for line in said.out.splitlines() if "1 of 2" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["policy/changed", "0", "w", "1 of 2", "2", "1.41"]
    assert "policy/new: 0 ranks in A, 2 in B" in said.out
    said = harness("diff", tmp_path, 2, 2)
    assert said.code == 0 and "0 entries differ, 3 are bit-identical" in said.out


def test_other_numbers_of_ranks_are_not_compared(store: Store) -> None:
    tiers = Tiers([Tier("file", "", store)])
    rank: Rank = ({"w": torch.ones(2)}, None)
    found = compare(Side(tiers, manifest(store, 1, w=[rank])), Side(tiers, manifest(store, 2, w=[rank, rank])))
    assert (found.entries[0].ranks, found.entries[0].tensors) == ((1, 2), ())


def test_two_runs(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b [1] é", 2.0)):
        store = open_store(str(tmp_path / name / "store"))
        commit(store, start_attempt(store, None), manifest(store, 7, w=[({"w": torch.tensor([value])}, None)]), None)
    said = harness("diff", tmp_path / "a", 7, 7, "--with", tmp_path / "b [1] é", "--json")
    assert json.loads(said.out)["entries"][0]["tensors"][0]["max_abs"] == 1.0
    said = harness("diff", tmp_path / "a", 7, 8, "--with", tmp_path / "b [1] é")
    assert said.code == 10 and "b [1] é: no checkpoint of step 8 in its history; there are: 7" in said.err
    assert harness("diff", tmp_path / "a", 7, "x").code == 2


def test_damaged_bytes_are_an_error(store: Store, tmp_path: Path) -> None:
    attempt = start_attempt(store, None)
    weights = [manifest(store, step, w=[({"w": torch.tensor([step])}, None)]) for step in (1, 2)]
    before = commit(store, attempt, weights[0], None)
    commit(store, attempt, weights[1], before)
    key = next(blob.key for blob in weights[1].blobs() if blob not in set(weights[0].blobs()))
    store.put(key, store.get(key)[:-1])
    said = harness("diff", tmp_path, 1, 2)
    assert said.code == 12 and key in said.err
