"""From a SkyRL config to a finished run: check everything that costs nothing, then start Ray, build models, train."""

import trainer.cpu  # noqa: F401  # isort: skip  # first: it answers for CUDA before SkyRL binds torch's names

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import ray
import skyrl_gym
from skyrl.backends.skyrl_train.utils.ppo_utils import sync_registries
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset import PromptDataset
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils.utils import prepare_runtime_environment

from checkpointing.errors import ConfigError, HarnessError, WorkerLost
from checkpointing.events import RunFinished
from checkpointing.phases import reached
from trainer.data import dataset_fingerprint, planned_steps
from trainer.determinism import environment, make_torch_deterministic
from trainer.generation import seed_requests
from trainer.resumable import ResumableTrainer
from trainer.run import open_run, topology

FORWARDED = ("HARNESS_PHASE_LISTENER", "HARNESS_FAULT_PLAN", "HARNESS_ATTEMPT")


class ResumableExperiment(BasePPOExp):
    """SkyRL's experiment with our trainer, our dataset loading and seeded requests."""

    def __init__(self, cfg: SkyRLTrainConfig, directory: Path, ray_address: str, device: str) -> None:
        self.directory, self.ray_address, self.device = directory, ray_address, device
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
        self.record = open_run(
            self.directory,
            self.cfg,
            dataset_fingerprint(self.cfg.data.train_data, self.train_dataset),
            planned_steps(self.cfg, len(self.train_dataset)),
        )
        if self.record.resumed_step < self.planned:
            start_ray(self.cfg, self.ray_address, self.device, self.directory)
            return super().get_colocate_pg(*args)
        return None

    @property
    def planned(self) -> int:
        return planned_steps(self.cfg, len(self.train_dataset))

    def get_generator(self, *args: Any, **kwargs: Any) -> Any:
        generator = super().get_generator(*args, **kwargs)
        seed_requests(generator, self.cfg.trainer.seed)
        return generator

    def get_trainer(self, **kwargs: Any) -> ResumableTrainer:
        trainer = ResumableTrainer(**kwargs)
        trainer.begin(self.record)
        return trainer

    def train(self) -> None:
        """Run all steps that are still to be done and record that the run is complete."""
        last = self.record.resumed_step
        if last < self.planned:
            self.trainer: ResumableTrainer | None = None
            try:
                trainer = self._setup_trainer()
                asyncio.run(trainer.train())
            except Exception as error:
                raise _first_cause(error, self.trainer) from error
            trainer.require_all_steps()
            last = trainer.global_step
        self.record.journal.append(RunFinished(planned_steps=self.planned, last_step=last))


def start_ray(cfg: SkyRLTrainConfig, address: str, device: str, directory: Path) -> None:
    """Join the cluster at `address`, or start our own for "local", with the environment that bit-consistency needs."""
    logs = directory.resolve() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    env = prepare_runtime_environment(cfg) | environment(device)
    env |= {name: os.environ[name] for name in FORWARDED if name in os.environ}
    env["SKYRL_LOG_FILE"] = str(logs / f"ranks-{time.strftime('%Y%m%d-%H%M%S')}.log")
    local: dict[str, Any] = {}
    if address == "local":
        ranks = sum(topology(cfg).values())
        # Logical resources. Ray starts an idle worker for each CPU it is told of: no more than will be used.
        local = {"num_cpus": ranks + 1, "include_dashboard": False, "_temp_dir": tempfile.gettempdir()}
        if device == "cpu":
            local["num_gpus"] = ranks
    ray.init(address=address, runtime_env={"env_vars": env}, log_to_driver=False, **local)
    sync_registries()


def _first_cause(error: Exception, trainer: ResumableTrainer | None) -> Exception:
    """Name what died first: a rank that was killed shows up as a collective that failed on another rank."""
    cause = getattr(error, "cause", error)
    if isinstance(cause, HarnessError):
        return cause
    if isinstance(error, aiohttp.ClientError):
        return WorkerLost(f"an engine failed: {error}")
    dead = _dead_ranks(trainer) if trainer is not None and trainer.dispatch is not None else []
    if dead or isinstance(error, ray.exceptions.RayActorError):
        step = trainer.global_step if trainer is not None else 0
        return WorkerLost(f"{', '.join(dead) or 'a rank'} died at step {step}")
    return error


def _dead_ranks(trainer: ResumableTrainer) -> list[str]:
    dead = []
    for role, group in trainer.dispatch._actor_groups.items():
        for rank, actor in enumerate(group._actor_handlers):
            try:
                ray.get(actor.get_node_local_rank.remote(), timeout=2)
            except ray.exceptions.RayActorError:
                dead.append(f"{role} rank {rank}")
            except ray.exceptions.GetTimeoutError:
                pass  # alive, and busy in a collective that will never finish
    return dead


def run_experiment(cfg: SkyRLTrainConfig, directory: Path, ray_address: str, device: str, envs: dict[str, str]) -> None:
    """Train to the end, resuming from the newest commit in `directory` if there is one.

    Args:
        cfg: from `skyrl_config`.
        directory: the run directory.
        ray_address: "local", or the address of a running cluster.
        device: "cpu" or "gpu".
        envs: {SkyRL-Gym id: "module:Class"} of environments to register.

    Raises:
        HarnessError: see checkpointing/errors.py; `WorkerLost` means that another attempt may succeed.
    """
    make_torch_deterministic()
    reached("driver.started", role="driver", attempt=int(os.environ.get("HARNESS_ATTEMPT", "0")), pid=os.getpid())
    for name, entry_point in envs.items():
        skyrl_gym.register(id=name, entry_point=entry_point)
    ResumableExperiment(cfg, directory, ray_address, device).train()
