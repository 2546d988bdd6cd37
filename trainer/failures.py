"""Why training ended: which of the errors that follow one another came first, and whether another try may help."""

import logging
import re
from typing import Any

import aiohttp
import ray
import torch

from checkpointing.errors import HarnessError, Preempted, RankLost, WorkerLost
from trainer.dead import DEAD

ANSWER_SECONDS = 2.0
ASKS = 5
"""Times that ranks are asked who has died when one of them says that a peer is gone: Ray may take longer to know."""

_NOBODY_S_BUG = re.compile(
    # SkyRL gives Ray 3 minutes for what a cluster may lack longer.
    r"Failed to create placement group"
    # torch; an error in such a worker's own code comes as that error.
    r"|DataLoader worker \(pid(\(s\))? .*\) (is killed by signal|exited unexpectedly)"
)
"""RuntimeErrors by their words, as they have no class of their own."""

_log = logging.getLogger(__name__)


def stopped(error: Exception, trainer: Any) -> HarnessError:
    """Asked to stop: save what can be saved. Ranks and engines that died were asked to stop as well, so that is no loss
    to report."""
    cause = first_cause(error, None)
    if isinstance(cause, HarnessError) and not isinstance(cause, Preempted | WorkerLost):
        return cause
    newest = trainer.saver.newest
    try:
        newest = trainer.saver.last()
    except (HarnessError, ray.exceptions.RayError) as failed:
        _log.warning("the last finished step could not be saved, fell back to step %d: %s", newest, failed)
    return Preempted(f"stopped as asked in step {trainer.global_step}; the newest checkpoint is of step {newest}")


def first_cause(error: Exception, trainer: Any) -> Exception:
    """Name what died first: a rank that was killed shows up as a collective that failed on another rank."""
    cause = getattr(error, "cause", error)
    if isinstance(cause, HarnessError):
        return cause
    if isinstance(cause, aiohttp.ClientError):
        return WorkerLost(f"an engine failed: {cause}")
    if _NOBODY_S_BUG.search(str(cause)):
        return WorkerLost(str(cause).strip())
    step = trainer.global_step if trainer is not None else 0
    broken = is_broken(cause)
    dead: list[str] = []
    for _ in range(ASKS if broken else 1):
        dead = dead or (dead_ranks(trainer) if trainer is not None else [])
    if dead or isinstance(error, DEAD):
        return RankLost(f"{', '.join(dead) or 'a rank'} died at step {step}")
    if broken:
        return RankLost(f"a rank failed at step {step}: {type(cause).__name__}: {cause}")
    return error


def is_broken(error: Exception) -> bool:
    """Whether a rank raises this when its device or its peers fail it. An error in its own code is none of these."""
    if isinstance(error, torch.distributed.DistError | torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and "gloo/" in str(error)  # gloo has no class of its own


def dead_ranks(trainer: Any) -> list[str]:
    """Ranks of `trainer` whose process has ended, by role and rank; with its pid where Ray tells. One that is alive and
    busy in a collective that will never finish does not answer."""
    calls = {}
    for role, group in (trainer.dispatch._actor_groups if trainer.dispatch is not None else {}).items():
        for rank, actor in enumerate(group._actor_handlers):
            calls[actor.get_node_local_rank.remote()] = f"{role} rank {rank}"
    answered, _ = ray.wait(list(calls), num_returns=len(calls), timeout=ANSWER_SECONDS) if calls else ([], [])
    dead = []
    for call in answered:
        try:
            ray.get(call)
        except DEAD as error:
            pid = re.search(r"pid[:=] ?(\d+)", str(error))
            dead.append(calls[call] + (f" (pid {pid[1]})" if pid else ""))
    return dead
