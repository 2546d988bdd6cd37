"""One element of one gradient of the rank is NaN, just before the optimizer uses it."""

import math
from typing import Any

from chaos import inside
from chaos.faults import Kind
from chaos.scene import Parameters, Scene
from chaos.scene import anywhere as available
from chaos.scene import nothing_to_heal as heal
from checkpointing.errors import ConfigError

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "rank"


def inject(scene: Scene) -> None:
    for name, parameter in inside.parameters(scene.owner):
        if parameter.grad is not None and inside.local(parameter.grad).numel():
            scene.note({"tensor": name, "was": float(_first(parameter))})
            inside.local(parameter.grad)[_place(parameter)] = math.nan
            return
    raise ConfigError("this rank holds no gradient now")


def witness(scene: Scene) -> str | None:
    """Read again from the rank, which still stands where the fault fired. Nobody else can see it."""
    noted = scene.noted()
    for name, parameter in inside.parameters(scene.owner) if noted and scene.owner is not None else ():
        if name == noted["tensor"] and math.isfinite(noted["was"]) and math.isnan(float(_first(parameter))):
            return f"the gradient of {name} begins with NaN, before with {noted['was']!r}"
    return None


def _place(parameter: Any) -> tuple[int, ...]:
    dimensions: int = inside.local(parameter.grad).ndim
    return (0,) * dimensions


def _first(parameter: Any) -> Any:
    return inside.local(parameter.grad)[_place(parameter)]
