"""What each step leaves in the journal: digests of rollouts and State, loss and gradient norm as exact floats."""

import json
import time
from itertools import chain
from typing import Any

import numpy as np
from skyrl.train.utils.callbacks import CallbackInput, TrainingCallback, TrainingControl

from checkpointing.canonical import canonical_json, digest
from checkpointing.errors import DivergenceError, EngineMismatch
from checkpointing.events import MAX_TENSOR_TABLE, Evaluated, RankStraggling, StepDone
from checkpointing.manifest import Entry
from checkpointing.phases import reached
from checkpointing.tensors import tensor_digest
from trainer.checkpoint import digest_state, restore_late
from trainer.determinism import seed_streams
from trainer.finite import require_finite
from trainer.groups import Shards, ask_all_ranks
from trainer.run import Run
from trainer.stragglers import Stragglers, slowest_ratio


def _ragged(rows: list[Any], dtype: type) -> str:
    """Digest of rows of unequal length, bit for bit."""
    values: np.ndarray[Any, Any] = np.fromiter(chain.from_iterable(rows), dtype=dtype)
    return digest(canonical_json([len(row) for row in rows]) + values.tobytes())


def digest_rollouts(output: Any, uids: list[str]) -> dict[str, str]:
    """Digests of what was generated and how it was rewarded. `output` is SkyRL's GeneratorOutput, rewards per token."""
    logprobs = output.get("rollout_logprobs")
    return {
        "prompts": digest(canonical_json(uids) + _ragged(output["prompt_token_ids"], np.int64).encode()),
        "tokens": _ragged(output["response_ids"], np.int64),
        "logprobs": _ragged(logprobs, np.float64) if logprobs else digest(b""),
        "rewards": _ragged(output["rewards"], np.float64),
    }


def _tensor_table(state: dict[str, Entry]) -> dict[str, dict[str, str]]:
    """{entry: {tensor: digest over all ranks}}, only for entries that have tensors."""
    table: dict[str, dict[str, str]] = {}
    for name, entry in state.items():
        by_tensor: dict[str, list[str]] = {}
        for shard in entry.shards:
            for tensor, value in shard.tensor_digests.items():
                by_tensor.setdefault(tensor, []).append(value)
        if by_tensor:
            table[name] = {tensor: digest("".join(values).encode())[:16] for tensor, values in by_tensor.items()}
    return table


def _require_same(before: StepDone, now: StepDone) -> None:
    """A step that an earlier attempt has already done must come out the same.

    Raises:
        DivergenceError: names the first part that differs, and its tensor where the journal has it.
    """
    for kind in ("data", "scalars", "state"):
        was, is_ = getattr(before, kind), getattr(now, kind)
        for name in was:
            if was[name] != is_.get(name):
                tensors = before.tensors.get(name, {})
                odd = [t for t, value in tensors.items() if now.tensors.get(name, {}).get(t) not in (None, value)]
                where = f"{name} ({odd[0]})" if odd else name
                raise DivergenceError(
                    f"step {now.step} was done before and comes out differently: {where} was {was[name]}, "
                    f"is {is_.get(name)}"
                )


MAX_LOGPROB_GAP = 0.1
"""Nats, mean over a batch. Float32 on CPU measures under 1e-6; a lost adapter was reported at 0.2 (TRL #5312)."""


def require_engine_in_step(metrics: dict[str, Any], step: int) -> None:
    """The engine must have sampled from the weights that the trainer holds.

    Raises:
        EngineMismatch: the log-probabilities of engine and trainer are too far apart.
    """
    whole_batch, mini_batches = (
        "policy/rollout_train_logprobs_abs_diff_mean",
        "minibatch_rollout_logprobs_abs_diff_mean",
    )
    gap = metrics.get(whole_batch, metrics.get(mini_batches, 0.0))
    if not gap <= MAX_LOGPROB_GAP:
        raise EngineMismatch(
            f"step {step}: log-probabilities of engine and trainer differ by {gap:.3f} on average, limit "
            f"{MAX_LOGPROB_GAP}; the engine serves other weights. Nothing of this step was saved"
        )


class StepJournal(TrainingCallback):
    """Journals every step and evaluation, and puts the late State entries back at the first epoch start."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.first_epoch = True
        self.step_started = time.monotonic()
        self.restore_started = time.monotonic()
        self.held: Shards = {}
        self.digested = 0
        self.of_ranks: dict[str, Entry] = {}
        self.stragglers = Stragglers()

    def on_train_start(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        """Only now it is certain which attempt this is: ranks may have had to fall back."""
        trainer.replicas.start(self.run)

    def on_epoch_start(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        if not self.first_epoch:
            return
        self.first_epoch = False
        if self.run.resumed is not None:
            restore_late(trainer, self.run, self.held, self.restore_started)
        else:
            # Only now: how often start-up draws from the driver's streams is nobody's promise.
            seed_streams(trainer.cfg.trainer.seed)

    def on_step_start(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        self.step_started = time.monotonic()

    def on_step_end(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        """Fires after the optimizer and before the save, so whatever is saved has been journaled."""
        trained = time.monotonic()
        trainer.saver.report()
        state = digest_state(trainer)
        self.digested = trainer.global_step
        self.of_ranks = {name: entry for name, entry in state.items() if entry.owner != "driver"}
        assert callback_input.batch is not None and callback_input.metrics is not None
        metrics = callback_input.metrics | {k: v for k, v in trainer.all_metrics.items() if k.startswith("reward/")}
        metrics |= {k: v for k, v in trainer.all_metrics.items() if k.startswith("critic/")}
        require_finite(trainer, self.run, trainer.global_step, metrics)
        try:
            require_engine_in_step(trainer.all_metrics | callback_input.metrics, trainer.global_step)
        except EngineMismatch:
            trainer.rollouts.discard()  # or the next attempt would be answered the same
            raise
        advantages = callback_input.batch["advantages"]
        tensors = _tensor_table(state)
        if not trainer.save_is_due() and len(json.dumps(tensors)) > MAX_TENSOR_TABLE:
            tensors = {}
        self._look_for_stragglers(trainer)
        done = StepDone(
            step=trainer.global_step,
            epoch=trainer.train_dataloader.epoch,
            seconds=trained - self.step_started,
            digest_seconds=time.monotonic() - trained,
            state={name: entry.digest for name, entry in state.items()},
            tensors=tensors,
            data=trainer.rollout_digests | {"advantages": tensor_digest(advantages)},
            scalars={name: float(value).hex() for name, value in metrics.items()},
            zero_advantages=not bool(advantages.any()),
            **trainer.rollouts.take_tokens("train"),
        )
        self.run.journal.append(done)
        trainer.all_metrics |= trainer.saver.metrics()
        if done.step in self.run.steps_before:
            _require_same(self.run.steps_before[done.step], done)
        reached("step.trained", step=done.step)

    def _look_for_stragglers(self, trainer: Any) -> None:
        seconds = ask_all_ranks(trainer, "own_seconds")
        for one in self.stragglers.after(seconds):
            node = trainer.nodes[one.role][one.rank]
            self.run.journal.append(RankStraggling(step=trainer.global_step, node=node, **one._asdict()))
        ratio = slowest_ratio(seconds)
        if ratio is not None:
            trainer.all_metrics["timing/slowest_rank_ratio"] = ratio

    def on_eval_start(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        reached("evaluate.begin", step=trainer.global_step)

    def on_eval_end(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        assert callback_input.metrics is not None
        metrics = {name: float(value) for name, value in callback_input.metrics.items()}
        tokens = trainer.rollouts.take_tokens("eval")
        self.run.journal.append(Evaluated(step=trainer.global_step, metrics=metrics, **tokens))
