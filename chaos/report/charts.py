"""A scalar of two runs, step by step, one over the other: where the curves are one, the runs agree."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from checkpointing.events import AttemptStarted, StepDone
from checkpointing.journal import Record

LEFT, RIGHT, TOP, BOTTOM, WIDTH, HEIGHT = 46, 394, 10, 192, 400, 220
"""Of the drawing: the edges of the plot, and the whole, in its own units."""


class Tick(NamedTuple):
    at: float
    label: str


class Dot(NamedTuple):
    x: float
    y: float
    title: str


class Line(NamedTuple):
    run: str
    path: str
    dots: list[Dot]


class Chart(NamedTuple):
    title: str
    unit: str
    lines: list[Line]
    xs: list[Tick]
    ys: list[Tick]
    resumes: list[Tick]
    not_finite: int
    """Values that can't be drawn."""


def chart(title: str, unit: str, names: Sequence[str], baseline: Sequence[Record], subject: Sequence[Record]) -> Chart:
    """`names`: what the scalar may be called; the first that a run has counts."""
    runs = {"baseline": _values(names, baseline), "with faults": _values(names, subject)}
    drawn = [(s, v) for values in runs.values() for s, v in values.items() if math.isfinite(v)]
    steps, heights = [step for step, _ in drawn] or [1], [value for _, value in drawn] or [0.0]
    low, high, first, last = min(heights), max(heights), min(steps), max(steps)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)

    def x(step: float) -> float:
        return round(LEFT + 8 + (RIGHT - LEFT - 16) * (step - first) / max(last - first, 1), 1)

    def y(value: float) -> float:
        return round(BOTTOM - 8 - (BOTTOM - TOP - 16) * (value - low) / (high - low), 1)

    lines = []
    for run, values in runs.items():
        dots, path, pen = [], [], "M"
        for step in sorted(values):
            if not math.isfinite(values[step]):
                pen = "M"  # a gap
                continue
            dots.append(Dot(x(step), y(values[step]), f"{run}, step {step}: {values[step]:.6g}"))
            path.append(f"{pen}{dots[-1].x} {dots[-1].y}")
            pen = "L"
        lines.append(Line(run, "".join(path), dots))
    resumed = [r.event.resumed_from or 0 for r in subject if isinstance(r.event, AttemptStarted)][1:]
    return Chart(
        title=title,
        unit=unit,
        lines=[line for line in lines if line.dots],
        xs=[Tick(x(step), str(int(step))) for step in _round_ones(first, last, whole=True)],
        ys=[Tick(y(value), f"{value:.4g}") for value in _round_ones(low, high)],
        resumes=[Tick(x(max(step + 0.5, first)), f"resumed from step {step}") for step in resumed],
        not_finite=sum(not math.isfinite(value) for values in runs.values() for value in values.values()),
    )


def _values(names: Sequence[str], records: Sequence[Record]) -> dict[int, float]:
    """{step: value}; of a step done more than once the last."""
    done = {record.event.step: record.event.scalars for record in records if isinstance(record.event, StepDone)}
    name = next((name for name in names if any(name in scalars for scalars in done.values())), None)
    return {step: float.fromhex(scalars[name]) for step, scalars in done.items() if name in scalars} if name else {}


def _round_ones(low: float, high: float, whole: bool = False) -> list[float]:
    """Three to six round numbers from `low` to `high`."""
    rough = max((high - low) / 5, 1e-12)
    size: float = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    step = max(1.0, round(step)) if whole else step
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
