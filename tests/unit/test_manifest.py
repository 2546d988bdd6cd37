"""A manifest says the same for the same state, and anything else than an intact one of version 1 is refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from checkpointing.blobs import Blob
from checkpointing.canonical import canonical_json, digest
from checkpointing.errors import CorruptBlob, FormatError
from checkpointing.manifest import Entry, Manifest, Shard, entry_digest, get_manifest, put_manifest
from checkpointing.records import decode, encode
from checkpointing.store import Store

from .checkpoint_samples import sample, without_fsync

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text('aé\n"\\😀'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@pytest.fixture
def manifest(store: Store) -> Manifest:
    return sample(store, 7, "weights")


# Canonical JSON


@given(JSON)
def test_canonical_json_is_json_and_one_for_each_value(value: Any) -> None:
    data = canonical_json(value)
    assert json.loads(data) == value
    assert canonical_json(json.loads(data)) == data


def test_canonical_json_is_what_the_format_says() -> None:
    value = {"b": [1, 2.5, None], "a": {"é": True, "Z": "\n"}}
    assert canonical_json(value) == '{"a":{"Z":"\\n","é":true},"b":[1,2.5,null]}'.encode()


@pytest.mark.parametrize("value", [float("nan"), [float("-inf")], {"a": object()}, {1: 1, "a": 2}, b"bytes", "\ud800"])
def test_what_is_not_json_is_refused(value: object) -> None:
    with pytest.raises(FormatError, match="canonical JSON"):
        canonical_json(value)


def test_digest_is_blake3_of_any_buffer() -> None:
    empty = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert digest(b"") == digest(memoryview(b"")) == digest(bytearray()) == empty


# What is equal, what is not


def test_a_manifest_comes_back_as_it_was(store: Store, manifest: Manifest) -> None:
    blob = put_manifest(store, manifest)
    assert [item.key for item in store.list("manifests/")] == [f"manifests/{blob.digest}.json"]
    assert get_manifest(store, blob) == manifest
    assert put_manifest(store, get_manifest(store, blob)) == blob


def test_blobs_are_all_that_is_needed_once_each(store: Store, manifest: Manifest) -> None:
    keys = [blob.key for blob in manifest.blobs()]
    assert sorted(keys) == [item.key for item in store.list("blobs/")]


def _shard(**changes: Any) -> Shard:
    one: dict[str, Any] = {"tensors": Blob.of(b"file"), "data": Blob.of(b"1"), "tensor_digests": {"w": digest(b"w")}}
    return Shard(**{"rank": 0} | one | changes)


def test_entry_digest_depends_on_the_state_and_not_on_the_files() -> None:
    same = entry_digest([_shard(), _shard(rank=1)])
    assert entry_digest([_shard(tensors=Blob.of(b"laid out otherwise")), _shard(rank=1, tensors=None)]) == same
    different = [
        [_shard()],
        [_shard(), _shard(rank=1, data=Blob.of(b"2"))],
        [_shard(), _shard(rank=1, data=None)],
        [_shard(), _shard(rank=1, tensor_digests={"w": digest(b"v")})],
        [_shard(), _shard(rank=1, tensor_digests={"v": digest(b"w")})],
        [_shard(), _shard(rank=1, tensor_digests={})],
    ]
    assert len({entry_digest(shards) for shards in different} | {same}) == len(different) + 1


# What is refused


Edit = Callable[[dict[str, Any]], object]


def _edit_entry(**changes: Any) -> Edit:
    return lambda body: body["entries"]["policy/parameters"].update(changes)


EDITS: dict[str, tuple[Edit, str]] = {
    "foreign": (lambda m: m.update(format="orbax"), "not a harness-checkpoint record, its format is 'orbax'"),
    "no format": (lambda m: m.pop("format"), "its format is None"),
    "newer": (lambda m: m.update(version=2), "format version 2, this program reads up to 1; use the newer program"),
    "no version": (lambda m: m.pop("version"), "format version None"),
    "version 0": (lambda m: m.update(version=0), "version: Input should be 1"),
    "version true": (lambda m: m.update(version=True), "format version True"),
    "unknown field": (lambda m: m.update(extra=1), "extra: Extra inputs"),
    "missing field": (lambda m: m.pop("run"), "run: Field required"),
    "wrong type": (lambda m: m.update(step="7"), "step: Input should be a valid integer"),
    "negative step": (lambda m: m.update(step=-1), "step: Input should be greater"),
    "other topology": (lambda m: m["topology"].update(policy=3), "has 2 shards, the topology has 3 ranks"),
    "unlisted owner of two ranks": (lambda m: m["topology"].clear(), "has 2 shards, the topology has 1 ranks"),
    "other key": (
        lambda m: m["entries"].update({"a/b": m["entries"].pop("driver/position")}),
        "holds the entry driver",
    ),
    "lost shard": (lambda m: m["entries"]["policy/parameters"]["shards"].pop(), "one shard from each of 2 ranks"),
    "swapped": (lambda m: m["entries"]["policy/parameters"]["shards"].reverse(), "one shard from each of 2 ranks"),
    "other owner": (_edit_entry(owner="critic"), "owner is said to be 'critic'"),
    "state digest": (_edit_entry(digest=digest(b"")), "digest does not match its shards"),
    "climbing name": (_edit_entry(name="../policy", owner=".."), "'../policy' is not a key"),
    "blob that climbs": (
        lambda m: m["entries"]["policy/parameters"]["shards"][0]["data"].update(digest="../" * 20 + "etc/"),
        "digest: String should match pattern",
    ),
    "tensors left out": (
        lambda m: m["entries"]["policy/parameters"]["shards"][0].update(tensors=None),
        "has digests of tensors but not the tensors",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_manifest_that_says_anything_else_is_refused(store: Store, manifest: Manifest, edit: str) -> None:
    change, complaint = EDITS[edit]
    body = json.loads(encode(manifest))
    change(body)
    data = canonical_json(body)
    blob = Blob.of(data)
    key = f"manifests/{blob.digest}.json"
    store.put(key, data)
    with pytest.raises(FormatError) as caught:
        get_manifest(store, blob)
    assert complaint in str(caught.value)
    assert key in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"step":NaN}'])
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"^place: "):
        decode(Manifest, data, "place")


def test_any_flipped_bit_is_noticed(store: Store) -> None:
    blob = put_manifest(store, Manifest(step=1, topology={}, entries={}, run={}))
    key = f"manifests/{blob.digest}.json"
    whole = store.get(key)
    with without_fsync():
        for place in range(8 * len(whole)):
            damaged = bytearray(whole)
            damaged[place // 8] ^= 1 << place % 8
            store.put(key, damaged)
            with pytest.raises(CorruptBlob, match=key):
                get_manifest(store, blob)


def test_what_an_entry_is_made_of_is_checked_when_it_is_made() -> None:
    with pytest.raises(ValidationError, match="one shard from each of 2 ranks"):
        Entry.of("policy/parameters", [_shard(), _shard()])
    with pytest.raises(FormatError, match="not a key"):
        Entry.of("policy/../x", [_shard()])
