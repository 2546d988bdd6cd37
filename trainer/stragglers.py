"""Which rank is slower than its peers at what it does alone.

Ranks wait for each other inside collectives, so a phase lasts as long on all of them as on the slowest. Once a step
every rank digests its State and multiplies a few matrices, and waits for nobody: those seconds are its own.
"""

import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch

RATIO = 3.0
"""A straggler takes this many times what the median of its peers takes,"""
MORE = 0.1
"""and at least so many seconds more,"""
STEPS = 3
"""in so many steps in a row."""

Seconds = dict[str, list[float]]
"""{role: own seconds in rank order}. Peers are the ranks of one role: roles hold different amounts of State."""


class Straggler(NamedTuple):
    role: str
    rank: int
    seconds: float
    median_of_others: float
    """Seconds; both in the last step."""


def straggling(steps: Sequence[Seconds]) -> list[Straggler]:
    """Who straggles after `steps`, oldest first: only the last `STEPS` of them count, and fewer say nothing."""
    if len(steps) < STEPS:
        return []
    slow = [{one[:2]: one for one in _compared(step) if _is_slow(one)} for step in steps[-STEPS:]]
    return [one for place, one in slow[-1].items() if all(place in step for step in slow)]


def slowest_ratio(step: Seconds) -> float | None:
    """The largest ratio of a rank's own seconds to the median of its peers'; None where no rank has a peer."""
    return max((one.seconds / one.median_of_others for one in _compared(step)), default=None)


class Stragglers:
    """Keeps the last steps, and tells of each straggler once until it is over."""

    def __init__(self) -> None:
        self._steps: deque[Seconds] = deque(maxlen=STEPS)
        self._known: set[tuple[str, int]] = set()

    def after(self, step: Seconds) -> list[Straggler]:
        """Those who were not straggling before `step`, the newest one."""
        self._steps.append(step)
        now = straggling(list(self._steps))
        new = [one for one in now if (one.role, one.rank) not in self._known]
        self._known = {(one.role, one.rank) for one in now}
        return new


def probe_seconds(device: torch.device) -> float:
    """Seconds that `device` takes for work of a fixed size, a few milliseconds. Draws no random number."""
    side = 256 if device.type == "cpu" else 2048
    factor = torch.full((side, side), 1 / side, device=device)  # its powers are all the same
    product = factor
    finish_queued_work(device)
    started = time.monotonic()
    for _ in range(3):
        product = product @ factor
    finish_queued_work(device)
    return time.monotonic() - started


def finish_queued_work(device: torch.device) -> None:
    """Or what was asked of `device` before would count as part of what comes now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _compared(step: Seconds) -> list[Straggler]:
    return [
        Straggler(role, rank, own, median(ranks[:rank] + ranks[rank + 1 :]))
        for role, ranks in step.items()
        if len(ranks) > 1
        for rank, own in enumerate(ranks)
    ]


def _is_slow(one: Straggler) -> bool:
    return one.seconds > RATIO * one.median_of_others and one.seconds - one.median_of_others >= MORE
