"""From a SkyRL config to a finished run: check everything that costs nothing, then start Ray, build models, train."""

import trainer.cpu  # isort: skip  # first: it answers for CUDA before SkyRL binds torch's names
import trainer.postponed  # noqa: F401  # isort: skip

import asyncio
import gc
import os
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import ray
import skyrl_gym
from skyrl.backends.skyrl_train.utils.ppo_utils import sync_registries
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset import PromptDataset
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils.utils import prepare_runtime_environment

from checkpointing.errors import ConfigError, Preempted, RankLost, WorkerLost
from checkpointing.events import RunFinished
from checkpointing.generations import delete_generations
from checkpointing.phases import reached, watch
from checkpointing.progress import ProgressFile
from checkpointing.trace import trace_phases
from trainer.answers import vocabulary_of
from trainer.client import PatientClient, let_router_start
from trainer.cluster import PlacementGroups, fit
from trainer.data import dataset_fingerprint, planned_steps
from trainer.determinism import environment, make_torch_deterministic
from trainer.engine import START_SECONDS
from trainer.failures import first_cause, stopped
from trainer.generation import seed_requests
from trainer.logs import log_environment
from trainer.rebuilding import end_attempt, furthest, may_rebuild
from trainer.resumable import ResumableTrainer
from trainer.rollouts import Rollouts, engine_digest
from trainer.run import Run, open_run, topology
from trainer.setup import Setup
from trainer.stopping import Stopping
from trainer.tracking import ContinuedTracking, MetricsAtStepEnd
from trainer.upkeep import Replicas

FORWARDED = ("HARNESS_PHASE_LISTENER", "HARNESS_FAULT_PLAN", "HARNESS_ATTEMPT", "HARNESS_TRACE")


class ResumableExperiment(BasePPOExp):
    """SkyRL's experiment with our trainer, our dataset loading and seeded requests."""

    def __init__(self, cfg: SkyRLTrainConfig, setup: Setup) -> None:
        self.setup = setup
        self.replicas, self.stopping, self.groups = Replicas(), Stopping(), PlacementGroups()
        self.groups.install()
        self.keepers: dict[str, Any] = {}
        self.client: Any = None
        self.rebuilt_at = -1
        self.tracker: ContinuedTracking | None = None
        self.stopping.listen()
        super().__init__(cfg)

    def _dataset(self, sources: list[str]) -> PromptDataset:
        # SkyRL's 8 spawned filter processes import the main module again each: minutes on a small machine.
        processes = min(8, max(1, (os.cpu_count() or 1) // 4))
        return PromptDataset(sources, self.tokenizer, self.cfg.trainer.max_prompt_length, num_workers=processes)

    def get_train_dataset(self) -> PromptDataset:
        dataset = self._dataset(self.cfg.data.train_data)
        if len(dataset) < self.cfg.trainer.train_batch_size:
            raise ConfigError(
                f"data.train_data: {len(dataset)} prompts are fewer than trainer.train_batch_size="
                f"{self.cfg.trainer.train_batch_size}"
            )
        return dataset

    def get_eval_dataset(self) -> PromptDataset | None:
        wanted = self.cfg.trainer.eval_interval > 0 and self.cfg.data.val_data
        return self._dataset(self.cfg.data.val_data) if wanted else None

    def get_colocate_pg(self, *args: Any) -> Any:
        """SkyRL asks for this once tokenizer and data are loaded: the run can be checked before it costs a GPU."""
        self.record = self._open_run()
        if self.record.resumed_step < self.planned:
            start_ray(self.cfg, self.setup)
            self.stopping.hear()
            if self._fit():
                self.record = self._open_run(self.record.attempt.attempt)  # of another number of ranks
            return super().get_colocate_pg(*args)
        return None

    def _open_run(self, after: int | None = None) -> Run:
        setup = self.setup
        return open_run(setup.directory, setup.checkpoints, self.cfg, self.fingerprint, self.planned, after)

    def _fit(self) -> bool:
        return self.setup.ray_address != "local" and fit(self.cfg, self.groups, self.setup)

    @cached_property
    def fingerprint(self) -> str:
        return dataset_fingerprint(self.cfg.data.train_data, self.train_dataset)

    @property
    def planned(self) -> int:
        return planned_steps(self.cfg, len(self.train_dataset))

    def get_generator(self, *args: Any, **kwargs: Any) -> Any:
        generator = super().get_generator(*args, **kwargs)
        engine = engine_digest(self.record, self.setup.device, self.setup.engines)
        vocabulary = vocabulary_of(Path(self.cfg.trainer.policy.model.path))
        self.rollouts = Rollouts(self.record, engine, self.setup.engines.get("continuation", False), vocabulary)
        seed_requests(generator, self.cfg.trainer.seed, self.rollouts)
        return generator

    def get_inference_client(self) -> Any:
        """One for all attempts of this process: in front of several engines SkyRL would start a router each time."""
        if self.client is None:
            let_router_start()
            model = self.cfg.trainer.policy.model
            alone = self.setup.engines and model.lora.rank > 0  # only engines of ours are started again
            adapter, patience = (model.lora.lora_sync_path, START_SECONDS) if alone else ("", 0.0)
            self.client = PatientClient.of(super().get_inference_client(), adapter, patience)
        elif self.cfg.trainer.placement.colocate_all:
            asyncio.run(self.client.sleep())  # as SkyRL does after they have started: ranks need the GPUs now
        return self.client

    def get_tracker(self) -> ContinuedTracking:
        """One for all attempts of this process."""
        if self.tracker is None:
            self.tracker = ContinuedTracking(self.record, self.cfg)
        else:
            self.tracker.go_on(self.record)
        return self.tracker

    def get_trainer(self, **kwargs: Any) -> ResumableTrainer:
        trainer = ResumableTrainer(**kwargs)
        trainer.begin(self.record, self.replicas, self.rollouts, self.keepers)
        trainer.add_callback(MetricsAtStepEnd())  # after the journal's own, which refuses what is not finite
        return trainer

    def train(self) -> None:
        """Run all steps that are still to be done and record that the run is complete."""
        last = self.record.resumed_step
        if last < self.planned:
            try:
                trainer = self._train_to_end()
            finally:
                if self.tracker is not None:
                    self.tracker.leave()
            trainer.require_all_steps()
            reached("finish.begin", step=trainer.global_step)
            trainer.saver.finish()
            last = trainer.global_step
        else:
            self.get_tracker().finish()  # a kill after the last commit leaves steps that the logger has not heard of
        if self.stopping.asked:
            raise Preempted("stopped as asked; every step is done, the tiers after the first may lack some of them")
        self.replicas.finish(self.record)
        delete_generations(self.setup.directory)
        self.record.journal.append(RunFinished(planned_steps=self.planned, last_step=last))

    def _train_to_end(self) -> ResumableTrainer:
        """Raises the first cause of what can't be recovered from here."""
        while True:
            self.trainer: ResumableTrainer | None = None
            try:
                trainer: ResumableTrainer = self._setup_trainer()
                asyncio.run(self.stopping.unless_asked(trainer.train()))
                return trainer
            except Exception as error:
                lost = self._lost_rank(error)
            self._become_next_attempt(lost)

    def _lost_rank(self, error: Exception) -> RankLost:
        """Let `error` end training, unless it is a lost rank that can be replaced from here."""
        if self.trainer is not None and self.stopping.asked:
            raise stopped(error, self.trainer) from error
        saved = self.trainer is not None and self.trainer.saver.abandon()
        cause = first_cause(error, self.trainer)
        if not (saved and isinstance(cause, RankLost) and may_rebuild(self.trainer, self.setup, self.rebuilt_at)):
            raise cause from error
        cause.__cause__ = error
        return cause

    def _become_next_attempt(self, lost: RankLost) -> None:
        """All ranks start anew, since all must hold the same step; engines, keepers and this process go on."""
        assert self.trainer is not None
        end_attempt(self.trainer, lost)
        self.stopping.nothing_to_lose()
        reached("rebuild.begin", step=self.trainer.global_step)
        self.trainer.close()
        self.keepers, self.rebuilt_at = self.trainer.keepers, furthest(self.trainer)
        lost.__cause__ = self.trainer = None
        gc.collect()  # what the frames of the failed loop held
        self.groups.reuse()
        self._fit()
        self.record = self._open_run(self.record.attempt.attempt)


SLOW_START = "timed out during startup"
"""A busy machine may take longer than the 30 s that Ray gives its node. Ray's own words, as it has no class for it."""


def start_ray(cfg: SkyRLTrainConfig, setup: Setup) -> None:
    """Join the cluster at `ray_address`, or start our own for "local", with the environment that bit-consistency
    needs.

    Raises:
        ConfigError: the cluster takes no such token.
        Preempted: asked to stop meanwhile.
        WorkerLost: our own was not there in time.
    """
    address, device = setup.ray_address, setup.device
    elsewhere = address != "local"
    env = prepare_runtime_environment(cfg) | environment(device) | log_environment(setup.directory, elsewhere)
    env |= {name: os.environ[name] for name in FORWARDED if name in os.environ}
    local: dict[str, Any] = {}
    if not elsewhere:
        ranks = sum(topology(cfg).values())
        # Logical resources. Ray starts an idle worker for each CPU it is told of: no more than will be used.
        local = {"num_cpus": ranks + 1, "include_dashboard": False, "_temp_dir": tempfile.gettempdir()}
        if device == "cpu":
            local["num_gpus"] = ranks
    try:
        ray.init(address=address, runtime_env={"env_vars": env}, log_to_driver=elsewhere, **local)
    except (ConnectionError, ray.exceptions.AuthenticationError) as error:
        if "RAY_AUTH_TOKEN" in f"{error!r} {error.__cause__!r}":  # Ray's own words name it, and no type does
            raise ConfigError(
                f"ray_address: the cluster at {address} does not take this token, or asks for one: "
                "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to a file with the cluster's token"
            ) from None
        raise
    except Exception as error:
        if elsewhere or SLOW_START not in str(error):
            raise
        raise WorkerLost(f"Ray's cluster did not start: {error}") from error
    except SystemExit as error:  # what Ray's own handler, which it has just set, makes of a SIGTERM
        raise Preempted("stopped as asked before training began") from error
    sync_registries()


def run_experiment(cfg: SkyRLTrainConfig, setup: Setup) -> None:
    """Train to the end, resuming from the newest commit in the run directory if there is one. `cfg`: `skyrl_config`'s.

    Raises:
        HarnessError: see checkpointing/errors.py; `WorkerLost` means that another attempt may succeed.
    """
    make_torch_deterministic()
    if path := os.environ.get("HARNESS_PROGRESS"):
        watch(ProgressFile(Path(path)).hear)
    trace_phases()
    reached("driver.started", role="driver", attempt=int(os.environ.get("HARNESS_ATTEMPT", "0")), pid=os.getpid())
    for name, entry_point in setup.envs.items():
        skyrl_gym.register(id=name, entry_point=entry_point)
    ResumableExperiment(cfg, setup).train()
