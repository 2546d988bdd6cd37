"""The index of many drills: one HTML page in the style of the reports that it links to."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from chaos.report import pages

Outcome = Literal["failed", "inconclusive", "passed", "unavailable"]


class Row(NamedTuple):
    """A drill: its file and what that says it does; `report` as a link from the page; `seed` of random faults."""

    drill: str
    what: str
    outcome: Outcome
    reasons: Sequence[str]
    seconds: float
    command: str
    seed: int | None = None
    report: str | None = None


def overall(outcomes: Sequence[str], planned: int) -> Literal["passed", "failed", "inconclusive"]:
    """Of all `planned` drills; what can't be done here counts neither way, and passing takes one that passed."""
    if "failed" in outcomes:
        return "failed"
    whole = len(outcomes) == planned and "passed" in outcomes and "inconclusive" not in outcomes
    return "passed" if whole else "inconclusive"


def render_index(rows: Sequence[Row], planned: int, when: str, versions: Mapping[str, str], commit: str | None) -> str:
    """The page as HTML, self-contained and without a script. Pure; `when` is shown as it is.

    Args:
        rows: the drills that have ended, of all that were `planned`.
        when: the page was made.
        versions: {package: version}.
        commit: of the source.
    """
    order = ("failed", "inconclusive", "passed", "unavailable")
    return (
        pages()
        .get_template("index.html")
        .render(
            outcome=overall([row.outcome for row in rows], planned),
            counts=Counter(row.outcome for row in rows),
            groups=[(name, [row for row in rows if row.outcome == name]) for name in order],
            planned=planned,
            done=len(rows),
            seconds=sum(row.seconds for row in rows),
            when=when,
            versions=versions,
            commit=commit,
        )
    )
