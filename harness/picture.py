"""The reward curves of several runs, one over the other."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

from checkpointing.events import AttemptStarted, StepDone
from checkpointing.journal import Record

matplotlib.use("Agg")

import matplotlib.pyplot as plt


def draw_rewards(runs: Mapping[str, Sequence[Record]], target: Path) -> None:
    """Mean reward of each step, a line a run, later ones thinner so that equal curves show; resumes are marked."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for index, (name, records) in enumerate(runs.items()):
        steps = {
            r.event.step: r.event.scalars["reward/avg_raw_reward"] for r in records if isinstance(r.event, StepDone)
        }
        rewards = [float.fromhex(steps[step]) for step in sorted(steps)]
        axes.plot(sorted(steps), rewards, linewidth=6 - 4 * index, alpha=0.5 + 0.5 * index, label=name)
        resumed = [r.event.resumed_from or 0 for r in records if isinstance(r.event, AttemptStarted)][1:]
        for step in resumed:
            axes.axvline(step + 0.5, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="step", ylabel="mean reward of the batch", title="dotted: resumed after a kill")
    axes.legend()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)
    plt.close(figure)
