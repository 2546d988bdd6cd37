"""A run that stock SkyRL began goes on under the harness, bit for bit; and its newest checkpoint is read by others."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from checkpointing.errors import ConfigError
from checkpointing.events import AttemptStarted, RunFinished, StepDone
from checkpointing.journal import Record, read_journal
from harness.cli import app
from harness.config import RunConfig
from harness.engines import EnginePool
from harness.supervisor import supervise

STOCK_STEP = 10


def save_stock_too(phase: str, where: dict[str, Any]) -> None:
    """Named by HARNESS_PHASE_LISTENER: from its start on the driver also saves the way stock SkyRL does."""
    if phase != "driver.started":
        return
    from skyrl.train.trainer import RayPPOTrainer

    from trainer.resumable import ResumableTrainer

    ours = ResumableTrainer.save_checkpoints

    def both(trainer: Any) -> str:
        key = ours(trainer)
        if trainer.global_step == STOCK_STEP:
            RayPPOTrainer.save_checkpoints(trainer)
        return key

    ResumableTrainer.save_checkpoints = both  # type: ignore[method-assign, assignment]


def steps(records: list[Record]) -> dict[int, StepDone]:
    return {record.event.step: record.event for record in records if isinstance(record.event, StepDone)}


def test_what_stock_skyrl_saved_goes_on_bit_for_bit(
    baseline: list[Record],
    configure: Callable[..., RunConfig],
    engines: EnginePool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    before = configure("stock", **{"trainer.max_training_steps": STOCK_STEP})
    with monkeypatch.context() as patched:
        patched.setenv("HARNESS_PHASE_LISTENER", f"{__name__}:save_stock_too")
        supervise(before, engines)
    stock = before.run_dir / f"global_step_{STOCK_STEP}"
    assert (stock / "policy" / "model_world_size_2_rank_1.pt").exists()

    after = configure("imported")
    config = tmp_path / "imported.yaml"
    config.write_text(json.dumps(after.model_dump(mode="json")))
    command = CliRunner().invoke(app, ["import", str(config), str(stock)], catch_exceptions=False)
    assert command.exit_code == 0, command.output
    with pytest.raises(ConfigError, match="a run has been started there"):
        CliRunner().invoke(app, ["import", str(config), str(stock)], catch_exceptions=False)
    supervise(after, engines)

    records = read_journal(after.run_dir)
    assert [r.event.resumed_from for r in records if isinstance(r.event, AttemptStarted)] == [STOCK_STEP]
    assert any(isinstance(record.event, RunFinished) for record in records)
    ours, theirs = steps(records), steps(baseline)
    assert sorted(ours) == list(range(STOCK_STEP + 1, 16))
    for step, done in ours.items():
        expected = theirs[step]
        assert (done.epoch, done.data, done.scalars) == (expected.epoch, expected.data, expected.scalars), step
        assert done.state == expected.state, step

    _exports_load(after, tmp_path)


def _exports_load(config: RunConfig, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out = tmp_path / "adapter"
    run = str(config.run_dir)
    command = CliRunner().invoke(app, ["export", run, str(out), "--promote", "served"], catch_exceptions=False)
    assert command.exit_code == 0, command.output
    base = AutoModelForCausalLM.from_pretrained(config.skyrl["trainer"]["policy"]["model"]["path"])
    inputs = torch.arange(8).unsqueeze(0)
    plain = base(input_ids=inputs).logits.detach().clone()
    adapted = PeftModel.from_pretrained(base, str(out))(input_ids=inputs).logits.detach()
    assert not torch.equal(plain, adapted), "the adapter says something"
    again = CliRunner().invoke(app, ["export", run, str(out)])
    assert again.exit_code != 0, "nothing that exists is overwritten"
