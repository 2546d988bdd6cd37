"""Manifest: everything one checkpoint consists of. Content-addressed, so a commit names it by digest."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator

from checkpointing.blobs import Blob, get_verified
from checkpointing.canonical import canonical_json, digest
from checkpointing.records import Digest, Record, Strict, decode, encode
from checkpointing.store import Store, check_key

Step = Annotated[int, Field(ge=0)]
WorldSize = Annotated[int, Field(ge=1)]


class Shard(Strict):
    """What one rank holds of an entry.

    tensors         its tensors as a safetensors blob; None if it has none, or if the shard was digested but not written
    data            the rest as a blob of canonical JSON
    tensor_digests  {tensor name: `tensor_digest`}
    """

    rank: Annotated[int, Field(ge=0)]
    tensors: Blob | None
    data: Blob | None
    tensor_digests: dict[str, Digest]


def entry_digest(shards: Sequence[Shard]) -> str:
    """The state digest of an entry over all ranks: equal state has equal digest, however its tensors lie in files."""
    parts = [
        {"rank": shard.rank, "data": shard.data and shard.data.digest, "tensors": shard.tensor_digests}
        for shard in shards
    ]
    return digest(canonical_json(parts))


class Entry(Strict):
    """One entry of the State. `name` is `owner/what`; the owner is a role, or "driver"; shards are in rank order."""

    name: str
    owner: str
    world_size: WorldSize
    digest: Digest
    shards: tuple[Shard, ...]

    @classmethod
    def of(cls, name: str, shards: Sequence[Shard]) -> Self:
        return cls(
            name=name,
            owner=name.partition("/")[0],
            world_size=len(shards),
            digest=entry_digest(shards),
            shards=tuple(shards),
        )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_key(self.name)
        if self.owner != self.name.partition("/")[0]:
            raise ValueError(f"{self.name}: its owner is said to be {self.owner!r}")
        if [shard.rank for shard in self.shards] != list(range(self.world_size)):
            raise ValueError(f"{self.name}: needs one shard from each of {self.world_size} ranks, in order")
        if self.digest != entry_digest(self.shards):
            raise ValueError(f"{self.name}: its digest does not match its shards")
        return self


class Manifest(Record):
    """A whole checkpoint.

    step      GRPO steps completed
    topology  {role: world size}; an owner that is not listed is one process, as the driver is
    entries   {entry name: entry}
    run       {what must not change within a run: digest}, such as config, dataset, tokenizer
    """

    step: Step
    topology: dict[str, WorldSize]
    entries: dict[str, Entry]
    run: dict[str, str]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, entry in self.entries.items():
            if entry.name != name:
                raise ValueError(f"{name}: holds the entry {entry.name}")
            ranks = self.topology.get(entry.owner, 1)
            if entry.world_size != ranks:
                raise ValueError(f"{name}: has {entry.world_size} shards, the topology has {ranks} ranks")
            if any(shard.tensor_digests and not shard.tensors for shard in entry.shards):
                raise ValueError(f"{name}: has digests of tensors but not the tensors")
        return self

    def blobs(self) -> Iterator[Blob]:
        """Every blob the checkpoint needs, each once."""
        shards = [shard for entry in self.entries.values() for shard in entry.shards]
        yield from dict.fromkeys(blob for shard in shards for blob in (shard.tensors, shard.data) if blob)


def put_manifest(store: Store, manifest: Manifest) -> Blob:
    """Store `manifest` under its digest; returns what a commit has to name."""
    data = encode(manifest)
    blob = Blob.of(data)
    store.put(manifest_key(blob), data)
    return blob


def get_manifest(store: Store, blob: Blob) -> Manifest:
    """Read back what `put_manifest` stored.

    Raises:
        CorruptBlob: it is missing or does not match its digest.
        FormatError: foreign, of a newer version, or not a valid manifest.
    """
    return decode(Manifest, get_verified(store, manifest_key(blob), blob), manifest_key(blob))


def manifest_key(blob: Blob) -> str:
    return f"manifests/{blob.digest}.json"
