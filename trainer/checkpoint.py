"""A save and a restore, seen from the driver. Read `save` and `restore` top to bottom: they are the whole path.

save      every rank writes its shards as blobs, in parallel -> driver writes its own -> manifest -> commit
restore   every rank reads its shards and captures them again -> driver the same -> what is held must be what was saved
"""

import time
from typing import Any

import ray

from checkpointing.commit import Commit, commit
from checkpointing.errors import MissingEntry, TopologyMismatch
from checkpointing.events import CheckpointCommitted, StateRestored
from checkpointing.manifest import Entry, Manifest, Shard
from checkpointing.phases import reached
from trainer.run import Run
from trainer.shards import digest_entries, read_entries, require_equal, write_entries
from trainer.state import entries_of

Shards = dict[str, list[Shard]]
"""{entry: its shards in rank order}"""


def _groups(trainer: Any) -> dict[str, Any]:
    """{role: SkyRL actor group}, the roles that have something to capture."""
    groups: dict[str, Any] = trainer.dispatch._actor_groups
    return {role: group for role, group in groups.items() if entries_of(role, trainer.cfg.trainer)}


def _on_all_ranks(trainer: Any, method: str, *args: Any) -> Shards:
    """Call `method` on every rank of every group at once and gather {entry: shards}."""
    groups = _groups(trainer)
    for role in groups:
        trainer.dispatch._ensure_on_gpu(role)
    calls = [actor_method.remote(*args) for g in groups.values() for actor_method in _methods(g, method)]
    gathered: Shards = {}
    for shards in ray.get(calls):
        for name, shard in shards.items():
            gathered.setdefault(name, []).append(shard)
    return gathered


def _methods(group: Any, name: str) -> list[Any]:
    return [getattr(actor, name) for actor in group._actor_handlers]


def digest_state(trainer: Any) -> dict[str, Entry]:
    """Every State entry with its digests, nothing written; late entries included."""
    shards = _on_all_ranks(trainer, "digest_state")
    shards |= {n: [s] for n, s in digest_entries(entries_of("driver", trainer.cfg.trainer), trainer).items()}
    return {name: Entry.of(name, parts) for name, parts in shards.items()}


def save(trainer: Any, run: Run) -> Commit:
    """Capture the State after `trainer.global_step` steps and commit it.

    Raises:
        StoreError: storage refused; the checkpoints before this one are untouched.
        Fenced: a newer attempt of this run exists.
    """
    started, step = time.monotonic(), trainer.global_step
    reached("save.begin", step=step)
    shards = _on_all_ranks(trainer, "write_state", run.store_url, step)
    driver = write_entries(entries_of("driver", trainer.cfg.trainer), trainer, run.store)
    shards |= {name: [shard] for name, shard in driver.items()}
    manifest = Manifest(
        step=step,
        topology=run.topology,
        entries={name: Entry.of(name, parts) for name, parts in shards.items()},
        run=run.identity,
    )
    committed = commit(run.store, run.attempt, manifest, run.parent)
    run.parent = committed
    run.journal.append(
        CheckpointCommitted(
            step=step,
            commit=committed.key,
            bytes_total=sum(blob.size for blob in manifest.blobs()),
            seconds=time.monotonic() - started,
        )
    )
    reached("save.committed", step=step)
    return committed


def restore(trainer: Any, run: Run) -> None:
    """Put the State of `run.resumed` back, all but the late entries, and require it to be held exactly.

    Raises:
        MissingEntry: the checkpoint lacks an entry that this run has.
        TopologyMismatch: it was saved by another number of ranks.
        DivergenceError: an owner does not hold what was saved.
    """
    assert run.resumed is not None
    manifest = run.resumed[1]
    reached("restore.begin", step=manifest.step)
    saved = {name: {shard.rank: shard for shard in entry.shards} for name, entry in manifest.entries.items()}
    calls, of_call = [], []
    for role, group in _groups(trainer).items():
        trainer.dispatch._ensure_on_gpu(role)
        names = [entry.name for entry in entries_of(role, trainer.cfg.trainer)]
        for rank, read in enumerate(_methods(group, "read_state")):
            mine = {name: _shard(saved, name, rank) for name in names}
            calls.append(read.remote(run.store_url, mine))
            of_call.append(mine)
    for mine, held in zip(of_call, ray.get(calls), strict=True):
        require_equal(mine, held)
    early = [entry for entry in entries_of("driver", trainer.cfg.trainer) if not entry.late]
    mine = {entry.name: _shard(saved, entry.name, 0) for entry in early}
    require_equal(mine, read_entries(early, trainer, run.store, mine))


def restore_late(trainer: Any, run: Run, started: float) -> None:
    """Put the late entries back, then journal what the whole State holds. `started`: when the restore began."""
    assert run.resumed is not None
    manifest = run.resumed[1]
    late = [entry for entry in entries_of("driver", trainer.cfg.trainer) if entry.late]
    mine = {entry.name: manifest.entries[entry.name].shards[0] for entry in late}
    require_equal(mine, read_entries(late, trainer, run.store, mine))
    held = {name: entry.digest for name, entry in digest_state(trainer).items()}
    seconds = time.monotonic() - started
    run.journal.append(StateRestored(step=manifest.step, entries=held, seconds=seconds))
    reached("restore.end", step=manifest.step)


def _shard(saved: dict[str, dict[int, Shard]], name: str, rank: int) -> Shard:
    if name not in saved:
        raise MissingEntry(f"{name}: not in the checkpoint; resume with the version and config that saved it")
    if rank not in saved[name]:
        raise TopologyMismatch(f"{name}: saved by {len(saved[name])} ranks, this run asks for rank {rank}")
    return saved[name][rank]
