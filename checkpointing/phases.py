"""Where the run is, said aloud: the one seam between the code that trains and whatever watches or breaks it.

Code that reaches a named place calls `reached("save.before_commit", step=7)`. Nothing happens unless the environment
variable `HARNESS_PHASE_LISTENER` names a callable as `module:function`; drills set it, production leaves it unset.
The sets below hold every name in use, in the order of a step.
"""

import importlib
import os
from collections.abc import Callable
from functools import cache
from typing import Any

DRIVER_PHASES = frozenset(
    {
        "driver.started",  # role="driver", attempt: said first, so that a listener knows which process this is
        "restore.begin",
        "restore.end",
        "evaluate.begin",
        "generate.begin",
        "generate.request",  # one request has been answered
        "reward.begin",
        "forward.begin",
        "step.trained",
        "save.begin",
        "save.before_manifest",
        "save.before_commit",
        "save.committed",
        "weight_sync.begin",
        "weight_sync.end",
    }
)
RANK_PHASES = frozenset(
    {
        "worker.started",  # role, rank, pid: said first; for a process that can't say it (an engine) by another one
        "restore.rank",
        "train.forward_backward",
        "train.optimizer",
        "save.capture",
        "save.shard_written",
    }
)
STORE_PHASES = frozenset(
    # Crash points inside the store, reached by the driver and by ranks.
    {"store.put_written", "store.put_renamed", "store.create_written", "store.create_linked"}
)
PHASES = DRIVER_PHASES | RANK_PHASES | STORE_PHASES

Listener = Callable[[str, dict[str, Any]], None]


@cache
def _listener() -> Listener | None:
    target = os.environ.get("HARNESS_PHASE_LISTENER")
    if not target:
        return None
    module, _, function = target.partition(":")
    listener: Listener = getattr(importlib.import_module(module), function)
    return listener


def reached(name: str, **where: Any) -> None:
    """Tell the listener, if there is one, that this process is at `name`; `where` holds step, role, rank."""
    listener = _listener()
    if listener is not None:
        listener(name, where)
