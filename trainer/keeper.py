"""Keeper: one process per node that writes what the node's ranks have staged, and holds the node's memory tier.

It keeps hashing, writing and syncing off the interpreter lock of the ranks. It knows no torch: what is staged is bytes.
"""

import os
from collections.abc import Buffer, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from checkpointing.errors import StoreError
from checkpointing.manifest import Shard
from checkpointing.phases import reached
from checkpointing.staging import Staged, write_staged
from checkpointing.store import Item, Promises, Store
from checkpointing.tiers import Tier, Tiers
from checkpointing.trace import trace_phases
from trainer.dead import DEAD
from trainer.stopping import ignore_sigterm

WRITERS = 4
"""Shards of its own ranks that one keeper writes at once."""

_memory = ray.method(concurrency_group="memory")
"""What others ask of a keeper has threads of its own: keepers that write wait for each other's."""

LIVES_SECONDS = 30.0
"""One that answers nothing for so long is taken for dead."""


class _Keeper:
    """`urls` are the run's tiers in order; `index` numbers the nodes; `kms_key` as in `open_store`."""

    def __init__(self, urls: Sequence[str], index: int, kms_key: str | None = None) -> None:
        self._tiers = Tiers.open(urls, kms_key=kms_key)
        self._peers: list[Store] = []
        ignore_sigterm()
        trace_phases()
        reached("worker.started", role="keeper", rank=index, pid=os.getpid())

    @_memory
    def pair(self, peer: Any) -> None:
        """From now on also keep a copy of what this node has in memory on the node of `peer`, and of no other."""
        self._peers = [PeerStore(peer)]

    def write(self, staged: Staged) -> dict[str, Shard]:
        """Store what a rank of this node has staged: in memory, on the peer, and on the primary tier."""
        own = [tier.store for tier in self._tiers.memory]
        return write_staged(staged, [*own, *self._peers, self._tiers.primary.store])

    @_memory
    def keep_only(self, keys: frozenset[str]) -> None:
        """Of the memory tier keep the blobs under `keys`: the newest checkpoint's, this node's and its peer's."""
        for tier in self._tiers.memory:
            for item in tier.store.list("blobs/"):
                if item.key not in keys:
                    tier.store.delete(item.key)

    @_memory
    def lives(self) -> None:
        pass

    @_memory
    def memory(self, verb: str, *args: Any) -> Any:
        """One of a Store's verbs on this node's memory, for `PeerStore`."""
        return getattr(self._tiers.memory[0].store, verb)(*args)


class PeerStore:
    """Another node's memory tier, reached through its keeper. Raises StoreError when that node is gone."""

    promises = Promises(atomic_put=True, durable_on_return=False, create_once=True)

    def __init__(self, keeper: Any) -> None:
        self._keeper = keeper

    def put(self, key: str, data: Buffer) -> None:
        self._ask("put", key, bytes(data))

    def get(self, key: str) -> bytes:
        data: bytes = self._ask("get", key)
        return data

    def list(self, prefix: str) -> Sequence[Item]:
        items: Sequence[Item] = self._ask("list", prefix)
        return items

    def delete(self, key: str) -> None:
        self._ask("delete", key)

    def create(self, key: str, data: Buffer) -> None:
        self._ask("create", key, bytes(data))

    def _ask(self, verb: str, *args: Any) -> Any:
        try:
            return ray.get(self._keeper.memory.remote(verb, *args))
        except DEAD as error:
            raise StoreError(f"the keeper of another node's memory is gone: {error}") from error


Keeper = ray.remote(num_cpus=0, max_concurrency=WRITERS, concurrency_groups={"memory": WRITERS})(_Keeper)


def start_keepers(
    urls: Sequence[str],
    nodes: Sequence[str],
    running: Mapping[str, Any] | None = None,
    kms_key: str | None = None,
) -> dict[str, Any]:
    """{Ray node id: its keeper}, each paired with the next node's where the run has a memory tier. Of those that are
    `running` the living are kept.

    Returns before new ones run; what is asked of them waits until they do.
    """
    here = list(dict.fromkeys(nodes))
    keepers = {node: keeper for node, keeper in (running or {}).items() if node in here and _lives(keeper)}
    for index, node in enumerate(here):
        if node not in keepers:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            keepers[node] = Keeper.options(scheduling_strategy=there).remote(urls, index, kms_key)
    if len(here) > 1 and Tiers.open(urls).memory:
        for index, node in enumerate(here):
            keepers[node].pair.remote(keepers[here[(index + 1) % len(here)]])
    return keepers


def _lives(keeper: Any) -> bool:
    try:
        ray.get(keeper.lives.remote(), timeout=LIVES_SECONDS)
    except (*DEAD, ray.exceptions.GetTimeoutError):
        return False
    return True


def sources(urls: Sequence[str], peers: Sequence[Any]) -> Tiers:
    """What a rank restores from, nearest first: its node's memory, other nodes', then the durable tiers."""
    tiers = Tiers.open(urls)
    others = [Tier(f"peer-{n}", "", PeerStore(peer)) for n, peer in enumerate(peers)] if tiers.memory else []
    return Tiers([*tiers.memory, *others, *tiers.durable])
