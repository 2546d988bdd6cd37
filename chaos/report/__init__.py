"""The report of a drill: one HTML file that needs nothing but itself, made of journals and a phase trace."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pydantic import BaseModel, ConfigDict

from chaos.report.charts import chart
from chaos.report.costs import costs, fault_rows, recovery_rows
from chaos.report.digests import digest_table
from chaos.report.timeline import timeline
from chaos.verdict import comparisons
from checkpointing.journal import Record
from checkpointing.trace import Mark

_LOSS = ("final_loss", "policy_loss", "loss")
_REWARD = ("reward/avg_raw_reward", "reward")


class Repeat(BaseModel):
    """What it takes to do the same again."""

    model_config = ConfigDict(frozen=True)

    command: str
    seed: int | None = None
    versions: dict[str, str] = {}


@dataclass(frozen=True)
class Drill:
    """What a report is made of. `subject`: the journal of the run that met the faults; `trace`: its phase trace."""

    title: str
    outcome: Literal["passed", "failed", "inconclusive"]
    reasons: Sequence[str]
    baseline: Sequence[Record]
    subject: Sequence[Record]
    repeat: Repeat
    trace: Sequence[Mark] = field(default=())


def render(drill: Drill) -> str:
    """The report as HTML. A pure function: nothing is read, no clock is asked.

    Everything that comes from a run is escaped, and the page forbids itself every script but its own and every request.
    """
    env = pages()
    assert env.loader is not None
    script = env.loader.get_source(env, "script.js")[0]
    compared = comparisons(drill.baseline, drill.subject)
    return env.get_template("template.html").render(
        drill=drill,
        script=Markup(script),  # ours
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        first=next((comparison for comparison in compared if comparison.differs), None),
        steps=digest_table(compared),
        timeline=timeline(drill.subject, drill.trace),
        faults=fault_rows(drill.subject, drill.trace),
        recoveries=recovery_rows(drill.subject, drill.trace),
        costs=costs(drill.baseline, drill.subject),
        charts=[
            chart("Reward", "mean reward of the batch", _REWARD, drill.baseline, drill.subject),
            chart("Loss", "loss", _LOSS, drill.baseline, drill.subject),
        ],
    )


def pages() -> Environment:
    """The templates of this package. What comes from a run is escaped."""
    env = Environment(
        loader=PackageLoader("chaos", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters["seconds"] = spoken
    return env


def spoken(seconds: float | None) -> str:
    """A length of time as people say it; "-" for None."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return " ".join(f"{value} {unit}" for value, unit in ((hours, "h"), (minutes, "min"), (rest, "s")) if value)
