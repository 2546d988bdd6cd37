"""Where the run is, said aloud: the one seam between the code that trains and whatever watches or breaks it.

Code that reaches a named place calls `reached("save.before_commit", step=7)`. Nothing happens unless the environment
variable `HARNESS_PHASE_LISTENER` names a callable as `module:function`; drills set it, production leaves it unset.
Names in use, in the order of a step:

    generate.begin  generate.request (one finished request)  reward.begin  forward.begin
    train.forward_backward (rank)  train.optimizer (rank)  step.trained
    save.begin  save.capture (rank)  save.shard_written (rank)  save.before_manifest  save.before_commit  save.committed
    store.put_written  store.put_renamed  store.create_written  store.create_linked   (crash points inside the store)
    weight_sync.begin  weight_sync.end
    restore.begin  restore.rank (rank)  restore.end  evaluate.begin
"""

import importlib
import os
from collections.abc import Callable
from functools import cache
from typing import Any

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
