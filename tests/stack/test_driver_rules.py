"""Rules of the driver that need SkyRL's classes but no cluster."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.canonical import canonical_json
from checkpointing.errors import DivergenceError, EngineMismatch, MissingEntry, RunMismatch, StepsMissing
from checkpointing.events import StepDone


def finished(step: int, planned: int, dynamic: str | None = None, exhausted: bool = False) -> Any:
    return SimpleNamespace(
        global_step=step,
        total_training_steps=planned,
        cfg=SimpleNamespace(
            trainer=SimpleNamespace(algorithm=SimpleNamespace(dynamic_sampling=SimpleNamespace(type=dynamic)))
        ),
        train_dataloader=SimpleNamespace(exhausted=exhausted),
    )


def test_planned_steps_must_equal_steps_run() -> None:
    from trainer.resumable import ResumableTrainer

    ResumableTrainer.require_all_steps(finished(120, 120))
    for trainer in (finished(60, 120), finished(60, 120, exhausted=True), finished(60, 120, dynamic="filter")):
        with pytest.raises(StepsMissing, match="planned 120 steps, ran 60"):
            ResumableTrainer.require_all_steps(trainer)
    # Filtering may use up the data before the planned number of steps; that is the end of the run.
    ResumableTrainer.require_all_steps(finished(60, 120, dynamic="filter", exhausted=True))


def test_an_engine_that_serves_other_weights_is_noticed() -> None:
    from trainer.steps import require_engine_in_step

    whole, mini = "policy/rollout_train_logprobs_abs_diff_mean", "minibatch_rollout_logprobs_abs_diff_mean"
    require_engine_in_step({whole: 0.015, mini: 0.5}, 1)  # later mini-batches have moved on: only the first counts
    for metrics in ({whole: 0.201}, {mini: 0.201}, {whole: float("nan")}):
        with pytest.raises(EngineMismatch, match="step 7"):
            require_engine_in_step(metrics, 7)


def done(**changes: Any) -> StepDone:
    fields: dict[str, Any] = {
        "step": 3,
        "epoch": 0,
        "seconds": 1.0,
        "digest_seconds": 0.1,
        "state": {"policy/parameters": "a", "policy/rng": "b"},
        "tensors": {"policy/parameters": {"w": "c", "x": "d"}},
        "data": {"tokens": "e"},
        "scalars": {"loss": (0.5).hex()},
        "zero_advantages": False,
    }
    return StepDone(**fields | changes)


def test_a_step_done_again_must_come_out_the_same() -> None:
    from trainer.steps import _require_same

    _require_same(done(), done(seconds=9.0))
    changes: list[tuple[dict[str, Any], str]] = [
        ({"data": {"tokens": "other"}}, "tokens"),
        ({"scalars": {"loss": (0.25).hex()}}, "loss"),
        ({"state": {"policy/parameters": "a", "policy/rng": "other"}}, "policy/rng"),
        ({"state": {"policy/parameters": "a"}}, "policy/rng"),
        (
            {
                "state": {"policy/parameters": "other", "policy/rng": "b"},
                "tensors": {"policy/parameters": {"w": "c", "x": "other"}},
            },
            r"policy/parameters \(x\)",
        ),
    ]
    for change, words in changes:
        with pytest.raises(DivergenceError, match=f"step 3 .*{words}"):
            _require_same(done(), done(**change))


class Patience:
    """A callback that keeps something across steps."""

    def __init__(self) -> None:
        self.best = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.best = state["best"]


def with_callbacks(*callbacks: Any) -> Any:
    return SimpleNamespace(_callback_handler=SimpleNamespace(callbacks=list(callbacks)))


def test_callbacks_keep_what_they_remember() -> None:
    from trainer import driver_state

    before, after = Patience(), Patience()
    before.best = 0.75
    captured = driver_state.capture_callbacks(with_callbacks(object(), before))
    canonical_json(captured.data)
    driver_state.restore_callbacks(with_callbacks(object(), after), captured)
    assert after.best == before.best
    with pytest.raises(MissingEntry, match="Patience"):
        driver_state.restore_callbacks(with_callbacks(), captured)


def test_a_dynamic_sampling_buffer_comes_back_exactly() -> None:
    from trainer import driver_state
    from trainer.captured import Captured

    buffer = {
        "sample_batch_count": 2,
        "collected_uids": ["3", "3"],
        "collected_generator_output": {"response_ids": [[1, 2], [3]], "rollout_logprobs": [[-0.1, -1e-300], [-2.5]]},
    }
    captured = driver_state.capture_dynamic_sampling(SimpleNamespace(dynamic_sampling_state=buffer))
    from_disk = Captured({}, json.loads(canonical_json(captured.data)))
    trainer = SimpleNamespace(dynamic_sampling_state=None)
    driver_state.restore_dynamic_sampling(trainer, from_disk)
    assert trainer.dynamic_sampling_state == buffer


def test_another_base_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer import driver_state
    from trainer.captured import Captured

    here = {"policy": {"path": "p", "digest": "1" * 64}, "ref": {"path": "r", "digest": "2" * 64}}
    monkeypatch.setattr(driver_state, "frozen_models", lambda cfg: here)
    trainer = SimpleNamespace(cfg=None)
    moved = {role: model | {"path": "moved"} for role, model in here.items()}
    driver_state.restore_frozen_models(trainer, Captured({}, moved))
    for saved in (here | {"ref": {"path": "r", "digest": "3" * 64}}, {"policy": here["policy"]}):
        with pytest.raises(RunMismatch, match="ref base model"):
            driver_state.restore_frozen_models(trainer, Captured({}, saved))
