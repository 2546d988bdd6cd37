"""What of SkyRL this harness does not resume exactly, and therefore refuses before anything is started."""

from typing import Any

from checkpointing.errors import ConfigError


def require_supported(cfg: Any) -> None:
    """`cfg` is SkyRL's validated config.

    Raises:
        ConfigError: it asks for something that could only be resumed in part.
    """
    trainer = cfg.trainer
    if trainer.strategy != "fsdp":
        raise ConfigError(f"trainer.strategy={trainer.strategy}: only fsdp is supported")
    for key in ("enabled", "simulate_training"):
        if getattr(trainer.fully_async, key):
            raise ConfigError(
                f"trainer.fully_async.{key}: the fully asynchronous trainer is not supported yet, since what it has in "
                "flight could only be resumed in part; use the synchronous trainer"
            )
    if trainer.resume_mode == "from_path":
        raise ConfigError("trainer.resume_mode=from_path: a run resumes from its own run directory; use latest or none")
    if trainer.update_ref_every_epoch and trainer.policy.model.lora.rank > 0:
        raise ConfigError(
            "trainer.update_ref_every_epoch with LoRA: SkyRL 0.4.0 exports the adapter alone, which its reference "
            "worker can't load; train all parameters (lora.rank=0) or keep the reference"
        )
    if trainer.ckpt_interval <= 0:
        raise ConfigError("trainer.ckpt_interval must be at least 1: without checkpoints nothing can be resumed")
