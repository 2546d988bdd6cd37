"""What is not finite is never saved: losses, gradient norms and the State itself are looked at after every step."""

import math
from collections.abc import Mapping
from typing import Any

from checkpointing.errors import NonFinite
from checkpointing.events import NonFiniteFound
from trainer.groups import ask_all_ranks
from trainer.run import Run

_MUST_BE_FINITE = ("loss", "grad_norm")


def require_finite(trainer: Any, run: Run, step: int, metrics: Mapping[str, Any]) -> None:
    """Losses and gradient norms in `metrics`, and every tensor of every rank, must be finite after `step`.

    Raises:
        NonFinite: one is not; the journal has all of them.
    """
    names = [
        f"{name} is {float(value)}"
        for name, value in sorted(metrics.items())
        if name.endswith(_MUST_BE_FINITE) and not math.isfinite(value)
    ]
    for role, ranks in ask_all_ranks(trainer, "not_finite").items():
        names += [f"{role} rank {rank}: {name}" for rank, found in enumerate(ranks) for name in found]
    if names:
        run.journal.append(NonFiniteFound(step=step, names=names))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise NonFinite(f"step {step}: not finite: {names[0]}{more}; nothing of this step was saved")
