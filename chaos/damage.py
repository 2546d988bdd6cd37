"""Which bytes of a store the storage faults damage, and how they are read and written behind the store's back."""

import os
from pathlib import Path

from pydantic import Field

from chaos import scene as scenes
from chaos.scene import Scene
from checkpointing.canonical import digest
from checkpointing.commit import Commit
from checkpointing.disk import fsync_dir
from checkpointing.errors import ConfigError, KeyMissing
from checkpointing.history import valid_commits
from checkpointing.manifest import get_manifest, manifest_key
from checkpointing.store import Store, open_store
from checkpointing.stores.memory import node_folder


class BlobParameters(scenes.Parameters):
    """Of the newest commit on the tier, the blob that holds what a rank saved of an entry."""

    entry: str = "policy/parameters"
    rank: int = Field(default=0, ge=0)


def newest_commit(store: Store) -> Commit:
    """Raises ConfigError: there is none yet."""
    for found in valid_commits(store):
        return found
    raise ConfigError("there is no commit yet to damage")


def note_blob(scene: Scene) -> str:
    """The key of the blob that the parameters name; it is written down with what it holds. Raises ConfigError."""
    store, told = open_store(scene.store), scene.parameters
    manifest = get_manifest(store, newest_commit(store).manifest)
    if told.entry not in manifest.entries:
        raise ConfigError(f"no entry {told.entry!r}; there are: {', '.join(manifest.entries)}")
    shards = manifest.entries[told.entry].shards
    if told.rank >= len(shards):
        raise ConfigError(f"{told.entry} has no rank {told.rank}")
    blob = shards[told.rank].tensors or shards[told.rank].data
    if blob is None:
        raise ConfigError(f"{told.entry} of rank {told.rank} has no bytes")
    return _note(scene, store, blob.key)


def note_record(scene: Scene, kind: str) -> str:
    """As `note_blob`, for the newest commit's own record ("commit") or its manifest ("manifest")."""
    store = open_store(scene.store)
    newest = newest_commit(store)
    return _note(scene, store, newest.key if kind == "commit" else manifest_key(newest.manifest))


def _note(scene: Scene, store: Store, key: str) -> str:
    whole = store.get(key)
    if len(whole) < 2:
        raise ConfigError(f"{key} is too short to damage")
    scene.note({"key": key, "digest": digest(whole), "size": len(whole)})
    return key


def write(scene: Scene, key: str, data: bytes) -> None:
    """In place where the store is a folder: damage happens to the file that is there, and says nothing to a store."""
    path = _path(scene.store, key)
    if path is None:
        open_store(scene.store).put(key, data)
        return
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()
        os.fsync(file.fileno())


def delete(scene: Scene, key: str) -> None:
    path = _path(scene.store, key)
    if path is None:
        open_store(scene.store).delete(key)
    else:
        path.unlink()
        fsync_dir(path.parent)


def read(scene: Scene) -> bytes | None:
    """What is now under the key that was written down; None if nothing. Raises StoreError where it can't be known."""
    try:
        return open_store(scene.store).get(scene.noted()["key"])
    except KeyMissing:
        return None


def _path(url: str, key: str) -> Path | None:
    scheme, _, rest = url.partition("://")
    roots = {"file": Path, "memory": node_folder}
    return roots[scheme](rest) / key if scheme in roots else None
