"""What a rank holds, by the names that SkyRL's workers give it: `model`, `optimizer`. Nothing here imports them."""

from typing import Any

from checkpointing.errors import ConfigError


def parameters(owner: Any) -> list[tuple[str, Any]]:
    """(name, parameter) of those that are trained, in the model's order. Raises ConfigError: the owner has none."""
    model = getattr(owner, "model", None)
    module = getattr(model, "model", model)  # SkyRL wraps policy and reference, the critic not
    if module is None or not hasattr(module, "named_parameters"):
        raise ConfigError("the place where the fault fires hands over no rank with a model")
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def local(tensor: Any) -> Any:
    """This rank's own part, as memory that can be written to."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
