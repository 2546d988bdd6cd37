"""Capture and restore of what lives in the driver. Every function takes the `ResumableTrainer`."""

from typing import Any

from checkpointing.errors import MissingEntry, RunMismatch
from trainer.captured import Captured
from trainer.identity import frozen_models


def capture_step(trainer: Any) -> Captured:
    return Captured({}, {"global_step": trainer.global_step})


def restore_step(trainer: Any, captured: Captured) -> None:
    trainer.global_step = captured.data["global_step"]


def capture_position(trainer: Any) -> Captured:
    return Captured({}, trainer.train_dataloader.position())


def restore_position(trainer: Any, captured: Captured) -> None:
    trainer.train_dataloader.seek(captured.data)


def capture_kl(trainer: Any) -> Captured:
    return Captured({}, {"value": float(trainer.reward_kl_controller.value)})


def restore_kl(trainer: Any, captured: Captured) -> None:
    trainer.reward_kl_controller.value = captured.data["value"]


def capture_dynamic_sampling(trainer: Any) -> Captured:
    """None between steps; within a step the batches gathered so far, token ids and log-probabilities included."""
    return Captured({}, trainer.dynamic_sampling_state)


def restore_dynamic_sampling(trainer: Any, captured: Captured) -> None:
    trainer.dynamic_sampling_state = captured.data


def _stateful_callbacks(trainer: Any) -> dict[str, Any]:
    """Callbacks that keep something across steps (best metric, patience) say so by having `state_dict`."""
    callbacks = [c for c in trainer._callback_handler.callbacks if hasattr(c, "state_dict")]
    return {f"{index}/{type(callback).__qualname__}": callback for index, callback in enumerate(callbacks)}


def capture_callbacks(trainer: Any) -> Captured:
    return Captured({}, {name: callback.state_dict() for name, callback in _stateful_callbacks(trainer).items()})


def restore_callbacks(trainer: Any, captured: Captured) -> None:
    callbacks = _stateful_callbacks(trainer)
    if callbacks.keys() != captured.data.keys():
        raise MissingEntry(
            f"driver/callbacks: the checkpoint holds {sorted(captured.data)}, this run has {sorted(callbacks)}"
        )
    for name, callback in callbacks.items():
        callback.load_state_dict(captured.data[name])


def capture_frozen_models(trainer: Any) -> Captured:
    """The base models by content digest: they are named, not copied."""
    return Captured({}, frozen_models(trainer.cfg))


def restore_frozen_models(trainer: Any, captured: Captured) -> None:
    """Nothing to load: what this attempt has loaded must be what the checkpoint names."""
    for role, model in frozen_models(trainer.cfg).items():
        saved = captured.data.get(role)
        if saved is None or saved["digest"] != model["digest"]:
            raise RunMismatch(
                f"driver/frozen_models: the {role} base model at {model['path']} is not the one this run was trained "
                f"on (digest {model['digest'][:12]}, not {saved and saved['digest'][:12]}); bring that model back"
            )
