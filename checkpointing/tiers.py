"""Tiers: the Stores of one run in order, nearest first, read as one Store.

    memory   a node's own memory: the newest checkpoints, for a process that has to start again
    primary  the first durable tier: where attempts fence each other and commits are made
    others   what `replication.py` carries commits to, in order; a step is durable when it is on the last

Writing goes to the primary alone. Reading asks every tier, so that a record or blob that is damaged or gone in one is
found in another.
"""

from collections.abc import Buffer, Callable, Iterator, Sequence
from typing import NamedTuple

from checkpointing.errors import ConfigError, CorruptBlob, StoreError
from checkpointing.signing import ANYBODY, Believed, Trust
from checkpointing.store import Item, KeyMissing, Promises, Store, open_store


class Tier(NamedTuple):
    name: str
    """Its scheme ("memory", "file", "s3"), numbered from the second of a kind on ("s3-2")."""
    url: str
    store: Store


class Copy(NamedTuple):
    tier: str
    data: bytes


class Tiers:
    """A Store made of Stores. `tiers` holds at least one durable one."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.all = tuple(tiers)
        self.durable = tuple(tier for tier in tiers if tier.store.promises.durable_on_return)
        if not self.durable:
            raise ConfigError("checkpoints.tiers: none of them is durable; add a file:// or s3:// tier")
        self.memory = tuple(tier for tier in tiers if tier not in self.durable)
        # Not asked again: a run that starts during an outage should wait it out once, not at every read.
        self._down: dict[str, StoreError] = {}

    @classmethod
    def open(
        cls, urls: Sequence[str], bandwidth: int | None = None, kms_key: str | None = None, trust: Trust = ANYBODY
    ) -> "Tiers":
        """Open the stores at `urls`, in order; `bandwidth` and `kms_key` as in `open_store`, for those on S3 alone.
        Nothing is written yet. Commits are read as far as `trust` believes them.

        Raises:
            ConfigError: a URL that no backend takes, a store that promises too little, or no durable tier.
        """
        kinds = [url.partition("://")[0] if "://" in url else "file" for url in urls]
        names = [f"{kind}-{n}" if (n := kinds[: i + 1].count(kind)) > 1 else kind for i, kind in enumerate(kinds)]
        stores = [
            open_store(url, bandwidth, kms_key) if kind == "s3" else open_store(url)
            for kind, url in zip(kinds, urls, strict=True)
        ]
        for kind, url, store in zip(kinds, urls, stores, strict=True):
            if kind != "memory" and not (store.promises.durable_on_return and store.promises.create_once):
                raise ConfigError(
                    f"store {url!r}: can't be a tier, as it may lose what it acknowledged or create a key twice; "
                    "use file://, s3:// or fsspec+s3://"
                )
        believed = [Believed(store, trust) for store in stores]
        return cls([Tier(*tier) for tier in zip(names, urls, believed, strict=True)])

    @property
    def primary(self) -> Tier:
        return self.durable[0]

    def tier(self, name: str) -> Tier:
        """The tier called `name`. Raises ConfigError if there is none."""
        for tier in self.all:
            if tier.name == name:
                return tier
        raise ConfigError(f"no tier {name!r}: this run has {', '.join(tier.name for tier in self.all)}")

    @property
    def promises(self) -> Promises:
        return self.primary.store.promises

    def put(self, key: str, data: Buffer) -> None:
        self.primary.store.put(key, data)

    def create(self, key: str, data: Buffer) -> None:
        self.primary.store.create(key, data)

    def delete(self, key: str) -> None:
        self.primary.store.delete(key)

    def get(self, key: str) -> bytes:
        for copy in self.copies(key):
            return copy.data
        raise KeyMissing(f"{key} is on none of {', '.join(tier.name for tier in self.all)}")

    def copies(self, key: str) -> Iterator[Copy]:
        """The bytes that each tier has under `key`, nearest first.

        Raises:
            CorruptBlob: no tier had any that is believed.
            StoreError: no tier had any, and one of them could not be asked: that is no proof of absence.
        """
        found, refused = False, None
        doubted: CorruptBlob | None = None
        for tier in self.all:
            try:
                data = self._ask(tier, tier.store.get, key)
            except KeyMissing:
                continue
            except StoreError as error:
                refused = error
                continue
            except CorruptBlob as error:
                doubted = error
                continue
            found = True
            yield Copy(tier.name, data)
        if not found and (failure := refused or doubted):
            raise failure

    def list(self, prefix: str) -> Sequence[Item]:
        """Every distinct item of all tiers; a key whose size differs between tiers occurs more than once.

        A tier that can't be asked is passed over as long as the primary knows the run.

        Raises:
            StoreError: the primary refused, or it has no attempts yet and another tier, which may, refused.
        """
        items, refused = set(self.primary.store.list(prefix)), None
        for tier in self.all:
            if tier != self.primary:
                try:
                    items |= set(self._ask(tier, tier.store.list, prefix))
                except StoreError as error:
                    refused = error
        if refused is not None and not self.primary.store.list("attempts/"):
            raise refused
        return sorted(items)

    def _ask[T](self, tier: Tier, verb: Callable[[str], T], key: str) -> T:
        """Raises KeyMissing, or the tier's StoreError, also one of an earlier call."""
        if tier.name in self._down:
            raise self._down[tier.name]
        try:
            return verb(key)
        except KeyMissing:
            raise
        except StoreError as error:
            if tier != self.primary:
                self._down[tier.name] = error
            raise


def copies(store: Store, key: str) -> Iterator[Copy]:
    """Every copy of the bytes under `key` that there is to choose from."""
    if isinstance(store, Tiers):
        yield from store.copies(key)
        return
    try:
        yield Copy("", store.get(key))
    except KeyMissing:
        return
