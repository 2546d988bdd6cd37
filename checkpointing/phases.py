"""Where the run is, said aloud: the one seam between the code that trains and whatever watches or breaks it.

Code that reaches a named place calls `reached("save.before_commit", step=7)`. Nothing happens unless the environment
variable `HARNESS_PHASE_LISTENER` names a callable as `module:function`; drills set it, production leaves it unset.
What the process itself wants to hear it asks for by `watch`. The sets below hold every name in use, in the order of a
step.
"""

import importlib
import os
from collections.abc import Callable
from functools import cache
from typing import Any

DRIVER_PHASES = frozenset(
    {
        "driver.started",  # role="driver", attempt: said first, so that a listener knows which process this is
        "rebuild.begin",  # a rank was lost, and all ranks are started anew
        "restore.begin",
        "restore.end",
        "evaluate.begin",
        "generate.begin",
        "generate.request",  # one request has been answered
        "reward.begin",
        "forward.begin",
        "train.begin",
        "step.trained",
        "save.wait",  # for the save before it
        "save.begin",
        "save.write",  # from here on behind training, in a thread of the driver
        "save.before_manifest",
        "save.before_commit",
        "save.committed",
        "weight_sync.begin",
        "weight_sync.end",
        "finish.begin",  # every step is done; what is in flight is waited for
    }
)
RANK_PHASES = frozenset(
    {
        "worker.started",  # role, rank, pid: said first; for a process that can't say it (an engine) by another one
        "restore.rank",
        "train.forward_backward",
        "train.optimizer",
        "save.capture",
        "save.shard_written",  # reached by the node's keeper; role and rank say whose shard
    }
)
STORE_PHASES = frozenset(
    # Crash points inside the store, reached by the driver and by ranks.
    {"store.put_written", "store.put_renamed", "store.create_written", "store.create_linked"}
)
REPLICATION_PHASES = frozenset(
    # Of a commit on its way to another tier. The process that carries it is "worker.started" as replicator.
    {"replicate.blob", "replicate.before_manifest", "replicate.before_commit", "replicate.committed"}
)
RETENTION_PHASES = frozenset({"prune.commit_deleted", "prune.blob_deleted", "prune.manifest_deleted"})
OWNER_PHASES = frozenset({"train.optimizer"})
"""Here `owner` is the rank itself, with gradients that are complete and not yet used: drills alter it from within."""
PHASES = DRIVER_PHASES | RANK_PHASES | STORE_PHASES | REPLICATION_PHASES | RETENTION_PHASES

Listener = Callable[[str, dict[str, Any]], None]


@cache
def _listener() -> Listener | None:
    target = os.environ.get("HARNESS_PHASE_LISTENER")
    if not target:
        return None
    module, _, function = target.partition(":")
    listener: Listener = getattr(importlib.import_module(module), function)
    return listener


_watchers: list[Listener] = []


def watch(watcher: Listener) -> None:
    """From now on `watcher` hears every place that this process reaches, before the listener does. It may raise."""
    _watchers.append(watcher)


def reached(name: str, **where: Any) -> None:
    """Tell whoever listens that this process is at `name`; `where` holds step, role, rank, owner."""
    for watcher in _watchers:
        watcher(name, where)
    listener = _listener()
    if listener is not None:
        listener(name, where)
