"""A restore, seen from the driver, and the digests of each step. (A save is `saving.py`.)

fetch     every rank reads and verifies what it needs of the newest commit, from the nearest tier that has it whole;
          if one can't, all of them go back to the commit before that together
restore   every rank puts it in place and captures it again -> driver the same -> what is held must be what was saved
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray

from checkpointing.blobs import get_blob
from checkpointing.errors import CorruptBlob, MissingEntry
from checkpointing.events import StateRestored
from checkpointing.manifest import Entry, Manifest, Shard
from checkpointing.phases import reached
from trainer.groups import Shards, ask_all_ranks, by_entry, groups
from trainer.run import Refusal, Run
from trainer.shards import Fetched, digest_entries, fetch_entries, require_equal, restore_entries
from trainer.state import Entry as StateEntry
from trainer.state import entries_of


def digest_state(trainer: Any) -> dict[str, Entry]:
    """Every State entry with its digests, nothing written; late entries included."""
    shards = by_entry(ask_all_ranks(trainer, "digest_state"))
    shards |= {n: [s] for n, s in digest_entries(entries_of("driver", trainer.cfg.trainer), trainer).items()}
    return {name: Entry.of(name, parts) for name, parts in shards.items()}


def restore(trainer: Any, run: Run) -> Shards:
    """Put the State of the newest commit that every rank can read back, all but the late entries.

    Returns what is held, for `restore_late` to complete.

    Raises:
        MissingEntry: the checkpoint lacks an entry that this run has.
        CheckpointError: there are commits, and none of them can be restored by every rank.
        DivergenceError: an owner does not hold what was saved.
    """
    reached("restore.begin", step=run.resumed_step)
    while refusals := _fetch(trainer, run):
        run.fall_back(refusals)
    held: Shards = {}
    for ranks in ask_all_ranks(trainer, "restore_state").values():
        for expected, of_rank in ranks:
            require_equal(expected, of_rank)
            for name, shard in of_rank.items():
                held.setdefault(name, []).append(shard)
    return held | _restore_driver(trainer, run, late=False)


def restore_late(trainer: Any, run: Run, held: Shards, started: float) -> None:
    """Put the late entries back, then journal what the whole State holds. `started` is `restore`'s monotonic time."""
    held |= _restore_driver(trainer, run, late=True)
    digests = {name: Entry.of(name, shards).digest for name, shards in held.items()}
    step = resumed(run).step
    run.journal.append(StateRestored(step=step, entries=digests, seconds=time.monotonic() - started))
    reached("restore.end", step=step)


def _fetch(trainer: Any, run: Run) -> list[Refusal]:
    """Have every rank, and the driver, read what it needs of `run.resumed`. Who could not, and why."""
    calls = []
    for role, group in groups(trainer).items():
        trainer.dispatch._ensure_on_gpu(role)
        shards = {entry.name: _shards(run, entry.name) for entry in entries_of(role, trainer.cfg.trainer)}
        for rank, (actor, node) in enumerate(zip(group._actor_handlers, trainer.nodes[role], strict=True)):
            peers = [keeper for other, keeper in trainer.keepers.items() if other != node]
            calls.append((role, rank, actor.fetch_state.remote(run.urls, peers, shards, run.resumed_step)))
    answers = [(role, rank, ray.get(call)) for role, rank, call in calls]
    try:
        _fetch_driver(trainer, run, entries_of("driver", trainer.cfg.trainer))
    except CorruptBlob as error:
        answers.append(("driver", 0, str(error)))
    return [Refusal(role, rank, reason) for role, rank, reason in answers if reason is not None]


def _fetch_driver(trainer: Any, run: Run, entries: Sequence[StateEntry]) -> Fetched:
    shards = {entry.name: _shards(run, entry.name) for entry in entries}
    return fetch_entries(entries, trainer, (0, 1), shards, partial(get_blob, run.tiers), run.resumed_step)


def _restore_driver(trainer: Any, run: Run, late: bool) -> Shards:
    entries = [entry for entry in entries_of("driver", trainer.cfg.trainer) if entry.late == late]
    fetched = _fetch_driver(trainer, run, entries)
    held = restore_entries(entries, trainer, fetched)
    require_equal({name: shard for name, (_, shard) in fetched.items()}, held)
    return {name: [shard] for name, shard in held.items()}


def _shards(run: Run, name: str) -> Sequence[Shard]:
    manifest = resumed(run)
    if name not in manifest.entries:
        raise MissingEntry(f"{name}: not in the checkpoint; resume with the version and config that saved it")
    return manifest.entries[name].shards


def resumed(run: Run) -> Manifest:
    assert run.resumed is not None, "only an attempt that resumes restores"
    return run.resumed[1]
