"""What could only be resumed in part is refused, and never resumed in part without a word."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.errors import ConfigError
from trainer.interchange.stock import import_stock
from trainer.supported import require_supported


def config(**changed: Any) -> Any:
    trainer = {
        "strategy": "fsdp",
        "fully_async": SimpleNamespace(enabled=False, simulate_training=False),
        "resume_mode": "latest",
        "update_ref_every_epoch": False,
        "policy": SimpleNamespace(model=SimpleNamespace(lora=SimpleNamespace(rank=8))),
        "ckpt_interval": 1,
    }
    return SimpleNamespace(trainer=SimpleNamespace(**trainer | changed))


def test_the_synchronous_trainer_is_supported() -> None:
    require_supported(config())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"fully_async": SimpleNamespace(enabled=True, simulate_training=False)}, "asynchronous .* not supported yet"),
        ({"fully_async": SimpleNamespace(enabled=False, simulate_training=True)}, "asynchronous .* not supported yet"),
        ({"strategy": "megatron"}, "only fsdp"),
        ({"resume_mode": "from_path"}, "its own run directory"),
        ({"update_ref_every_epoch": True}, "with LoRA"),
        ({"ckpt_interval": 0}, "at least 1"),
    ],
)
def test_what_is_not_is_an_error_of_the_config(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        require_supported(config(**changed))


def test_a_checkpoint_of_the_fully_asynchronous_trainer_is_not_imported(tmp_path: Path) -> None:
    """Its cursor runs ahead of what was trained, and what was in flight is in no file (RL #3599)."""
    (tmp_path / "fully_async_state.pt").touch()
    with pytest.raises(ConfigError, match="fully asynchronous trainer, which is not supported yet"):
        import_stock(tmp_path, 100)
