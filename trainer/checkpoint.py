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


def restore(trainer: Any, run: Run) -> Shards:
    """Put the State of `run.resumed` back, all but the late entries, and require it to be held exactly.

    Returns what is held, for `restore_late` to complete.

    Raises:
        MissingEntry: the checkpoint lacks an entry that this run has.
        TopologyMismatch: it was saved by another number of ranks.
        DivergenceError: an owner does not hold what was saved.
    """
    manifest = _resumed(run)
    reached("restore.begin", step=manifest.step)
    calls, asked = [], []
    for role, group in _groups(trainer).items():
        trainer.dispatch._ensure_on_gpu(role)
        names = [entry.name for entry in entries_of(role, trainer.cfg.trainer)]
        for rank, read in enumerate(_methods(group, "read_state")):
            asked.append({name: _shard(manifest, name, rank) for name in names})
            calls.append(read.remote(run.store_url, asked[-1]))
    held: Shards = {}
    for mine, of_rank in zip(asked, ray.get(calls), strict=True):
        require_equal(mine, of_rank)
        for name, shard in of_rank.items():
            held.setdefault(name, []).append(shard)
    return held | _restore_driver(trainer, run, late=False)


def restore_late(trainer: Any, run: Run, held: Shards, started: float) -> None:
    """Put the late entries back, then journal what the whole State holds. `started` is `restore`'s monotonic time."""
    held |= _restore_driver(trainer, run, late=True)
    digests = {name: Entry.of(name, shards).digest for name, shards in held.items()}
    step = _resumed(run).step
    run.journal.append(StateRestored(step=step, entries=digests, seconds=time.monotonic() - started))
    reached("restore.end", step=step)


def _restore_driver(trainer: Any, run: Run, late: bool) -> Shards:
    entries = [entry for entry in entries_of("driver", trainer.cfg.trainer) if entry.late == late]
    mine = {entry.name: _shard(_resumed(run), entry.name, 0) for entry in entries}
    held = read_entries(entries, trainer, run.store, mine)
    require_equal(mine, held)
    return {name: [shard] for name, shard in held.items()}


def _resumed(run: Run) -> Manifest:
    assert run.resumed is not None, "only an attempt that resumes restores"
    return run.resumed[1]


def _shard(manifest: Manifest, name: str, rank: int) -> Shard:
    if name not in manifest.entries:
        raise MissingEntry(f"{name}: not in the checkpoint; resume with the version and config that saved it")
    shards = manifest.entries[name].shards
    if rank >= len(shards):
        raise TopologyMismatch(f"{name}: saved by {len(shards)} ranks, this run asks for rank {rank}")
    return shards[rank]
