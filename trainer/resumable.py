"""SkyRL's trainer with its checkpointing replaced and its loop untouched.

SkyRL's own `train()` runs; the methods it calls on the way are where this class listens, saves and restores.
"""

import time
from typing import Any

import ray
from skyrl.train.trainer import RayPPOTrainer

from checkpointing.commit import commit_key
from checkpointing.errors import StepsMissing
from checkpointing.manifest import Entry
from checkpointing.phases import reached
from trainer.checkpoint import restore
from trainer.data import EpochLoader, planned_steps
from trainer.engine import wait_until_healthy
from trainer.groups import ask_all_ranks, by_entry
from trainer.keeper import start_keepers
from trainer.provenance import Machine, ranks_built
from trainer.rollouts import Rollouts
from trainer.run import Run
from trainer.saving import Saver
from trainer.steps import StepJournal, digest_rollouts
from trainer.upkeep import Replicas
from trainer.workers import CriticWorker, PolicyWorker, RefWorker


class ResumableTrainer(RayPPOTrainer):
    """A `RayPPOTrainer` whose whole State is committed and restored exactly. `run` is set before `train()`."""

    run: Run

    def begin(self, run: Run, replicas: Replicas, rollouts: Rollouts, keepers: dict[str, Any]) -> None:
        """Tell the trainer which attempt it is, before models are built. `keepers` are running from the one before."""
        self.run, self.replicas, self.rollouts, self.keepers = run, replicas, rollouts, keepers
        self.step_journal = StepJournal(run)
        self.add_callback(self.step_journal)
        self.saver = Saver(self, run)
        self.rollout_digests: dict[str, str] = {}

    def _build_train_dataloader_and_compute_training_steps(self) -> None:
        trainer = self.cfg.trainer
        self.train_dataloader = EpochLoader(
            self.train_dataset,
            trainer.train_batch_size,
            trainer.epochs,
            trainer.seed,
            self.cfg.data.dataloader.num_workers,
        )
        self.total_training_steps = planned_steps(self.cfg, len(self.train_dataset))

    def build_models(self, *_stock_workers: Any) -> None:
        super().build_models(PolicyWorker, CriticWorker, RefWorker)
        machines: dict[str, list[Machine]] = ask_all_ranks(self, "machine")
        self.nodes = {role: [one.node for one in ranks] for role, ranks in machines.items()}
        self.run.journal.append(ranks_built(machines))
        self.start_keepers()
        sync = self.dispatch.save_weights_for_sampler

        async def announced_sync(*args: Any, **kwargs: Any) -> None:
            if 0 < self.step_journal.digested == self.global_step:
                self.saver.remember(self.global_step, self.step_journal.of_ranks)
            reached("weight_sync.begin", step=self.global_step)
            weights = self._policy_digest()  # before the sync: a colocated policy has left the GPU after it
            await sync(*args, **kwargs)
            self.rollouts.synced(self.global_step, weights)
            reached("weight_sync.end", step=self.global_step)

        self.dispatch.save_weights_for_sampler = announced_sync

    def _policy_digest(self) -> str:
        """State digest of the policy's parameters, as they are after `global_step`."""
        name = "policy/parameters"
        if self.step_journal.digested == self.global_step and self.step_journal.of_ranks:
            return self.step_journal.of_ranks[name].digest
        if self.run.resumed is not None and self.run.resumed_step == self.global_step:
            return self.run.resumed[1].entries[name].digest
        return Entry.of(name, by_entry(ask_all_ranks(self, "digest_state"))[name]).digest

    def start_keepers(self) -> None:
        nodes = [node for ranks in self.nodes.values() for node in ranks]
        self.keepers = start_keepers(self.run.urls, nodes, self.keepers, self.run.settings.kms_key)

    def close(self) -> None:
        """Kill what is left of all actor groups, and end whatever this trainer has started in this process."""
        self.train_dataloader.close()
        self.rollouts.close()
        self.saver.close()
        for group in (self.dispatch._actor_groups if self.dispatch is not None else {}).values():
            for actor in group._actor_handlers:
                ray.kill(actor)
        if self._ray_gpu_monitor is not None:
            self._ray_gpu_monitor.stop()

    def init_weight_sync_state(self) -> None:
        """The first contact with the engines, which have been loading while the models were built."""
        wait_until_healthy(self.inference_engine_client.server_urls)
        super().init_weight_sync_state()

    async def generate(self, input_batch: Any) -> Any:
        reached("generate.begin", step=self.global_step)
        return await super().generate(input_batch)

    def postprocess_generator_output(self, generator_output: Any, uids: list[str], *args: Any, **kwargs: Any) -> Any:
        reached("reward.begin", step=self.global_step)
        return super().postprocess_generator_output(generator_output, uids, *args, **kwargs)

    def convert_to_training_input(self, generator_output: Any, uids: list[str]) -> Any:
        self.rollout_digests = digest_rollouts(generator_output, uids)
        return super().convert_to_training_input(generator_output, uids)

    def fwd_logprobs_values_reward(self, training_input: Any) -> Any:
        reached("forward.begin", step=self.global_step)
        return super().fwd_logprobs_values_reward(training_input)

    def train_critic_and_policy(self, data: Any) -> Any:
        reached("train.begin", step=self.global_step)
        return super().train_critic_and_policy(data)

    def _is_epoch_end(self) -> bool:
        return bool(self.global_step % len(self.train_dataloader) == 0)

    def save_is_due(self) -> bool:
        """SkyRL's own rule for the step that has just been trained."""
        every = self.cfg.trainer.ckpt_interval
        return every > 0 and (self._is_epoch_end() or self.global_step % every == 0)

    def save_checkpoints(self) -> str:
        """Called by SkyRL after the optimizer and before the weight sync: the State is copied, the commit follows.

        Returns where it will be."""
        left_behind = self.step_journal.of_ranks if self.step_journal.digested == self.global_step else {}
        self.saver.save(self.global_step, left_behind, last=self.global_step >= self.total_training_steps)
        return commit_key(self.global_step, self.run.attempt.attempt)

    def load_checkpoints(self) -> tuple[int, str | None]:
        """Called by SkyRL before the first weight sync. Returns (steps already done, commit's key)."""
        if self.run.resumed is None:
            return 0, None
        self.step_journal.restore_started = time.monotonic()
        self.step_journal.held = restore(self, self.run)
        if self._reference_update_is_due():
            super().update_ref_with_policy()
        # SkyRL's evaluation before training stands in for the one of this step, if the kill came before it.
        due = self.cfg.trainer.eval_interval > 0 and self.global_step % self.cfg.trainer.eval_interval == 0
        self.cfg.trainer.eval_before_train = due and self.global_step not in self.run.evaluated_before
        return self.global_step, self.run.resumed[0].key

    def _reference_update_is_due(self) -> bool:
        """SkyRL saves an epoch's last step before it moves the reference: the move is then still to be made."""
        moves = self.cfg.trainer.update_ref_every_epoch and self.ref_model is not None
        last = self.train_dataloader.epoch >= self.cfg.trainer.epochs - 1
        return bool(moves and self._is_epoch_end() and not last)

    def require_all_steps(self) -> None:
        """After `train()` returned.

        Raises:
            StepsMissing: fewer steps were done than planned although there was data left.
        """
        planned = self.total_training_steps
        filtered = self.cfg.trainer.algorithm.dynamic_sampling.type is not None and self.train_dataloader.exhausted
        if self.global_step != planned and not filtered:
            raise StepsMissing(f"planned {planned} steps, ran {self.global_step}; the run is not complete")
