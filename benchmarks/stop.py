"""How long training stands still, against a copy of the same bytes."""

from collections.abc import Iterator

import torch

from benchmarks.processes import Rank, stop_seconds
from benchmarks.profile import Profile
from benchmarks.report import Figure, alternate

_PIECE = 1 << 30
"""Bytes. The plain copy goes piece by piece where the state is larger, to spare memory; no cache is that large."""


def stop(profile: Profile) -> Iterator[Figure]:
    with profile.ranks() as ranks:
        cold = ranks.seconds(stop_seconds)
        ranks.call(_make_plain)
        ranks.seconds(_copy_plain), ranks.seconds(stop_seconds)
        ours, theirs = alternate(
            profile.quick_repetitions, lambda: ranks.seconds(stop_seconds), lambda: ranks.seconds(_copy_plain)
        )
    yield Figure("stop", "stop / warm memory copy", 1.3, ours, theirs)
    yield Figure("stop", "first stop / warm memory copy", None, [cold], [sorted(theirs)[len(theirs) // 2]])


def _make_plain(rank: Rank) -> None:
    assert rank.staged is not None
    size = min(rank.staged.nbytes, _PIECE)
    rank.kept["plain"] = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)


def _copy_plain(rank: Rank) -> float:
    assert rank.staged is not None
    source, target = rank.kept["plain"]
    whole, rest = divmod(rank.staged.nbytes, len(source))

    def copy() -> None:
        for _ in range(whole):
            target.copy_(source)
        target[:rest].copy_(source[:rest])

    return rank.together(copy)
