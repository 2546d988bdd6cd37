"""Every value that a verdict compared, by step and entry."""

from collections.abc import Sequence
from typing import NamedTuple

from chaos.verdict import Comparison


class Row(NamedTuple):
    """One entry of a step: the first pair of values that differs, else the first; `pairs` were compared."""

    shown: Comparison
    pairs: int


class Step(NamedTuple):
    step: int
    rows: list[Row]

    @property
    def different(self) -> int:
        return sum(row.shown.differs for row in self.rows)


def digest_table(compared: Sequence[Comparison]) -> list[Step]:
    """`compared`: as `chaos.verdict.comparisons` gives them, and in that order."""
    entries: dict[int, dict[tuple[bool, str], list[Comparison]]] = {}
    for one in compared:
        entries.setdefault(one.step, {}).setdefault((one.restored, one.entry), []).append(one)
    return [Step(step, [_row(pairs) for pairs in of_step.values()]) for step, of_step in entries.items()]


def _row(pairs: list[Comparison]) -> Row:
    return Row(next((one for one in pairs if one.differs), pairs[0]), len(pairs))
