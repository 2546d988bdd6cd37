"""The drills that defects are planted into, and that of a seed with nothing planted.

Their files are in FOLDER, what they leave is where all drills leave it.
"""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from chaos.judgement import Judgement
from harness.clusters import variables
from harness.drill import Exercise
from harness.engines import EnginePool
from tests.heads import Head
from tests.planted.defects import DEFECTS, KILL_DRIVER, KILL_RANK, planted, uneven_streams
from trainer.own_cluster import ON_LOOPBACK

FOLDER = Path("runs/planted")
STEPS = 4
RANKS = 2
SMALL: dict[str, Any] = {
    "skyrl.trainer.max_training_steps": STEPS,
    "skyrl.trainer.policy.model.lora.dropout": 0.1,  # so that ranks draw
    "skyrl.trainer.policy.optimizer_config.scheduler": "linear",  # so that it moves
    "skyrl.trainer.policy.optimizer_config.num_warmup_steps": 2,
}
WHOLE = SMALL | {
    "skyrl.trainer.algorithm.advantage_estimator": "gae",
    "skyrl.trainer.algorithm.use_kl_in_reward": True,
    "skyrl.trainer.algorithm.kl_ctrl.type": "adaptive",
    "skyrl.trainer.algorithm.kl_ctrl.horizon": 1000,
    "skyrl.trainer.critic_mini_batch_size": 2,
    "skyrl.trainer.critic.optimizer_config.scheduler": "linear",
    "skyrl.trainer.critic.optimizer_config.num_warmup_steps": 2,
    "skyrl.trainer.critic.model.path": "build/maze/model",
    "skyrl.trainer.ref.model.path": "build/maze/model",
}


class Planted(AbstractContextManager["Planted"]):
    """Runs the drills beside one pool of engines, and the baselines of each only once."""

    def __init__(self, console: Console, folder: Path = FOLDER, engines: EnginePool | None = None) -> None:
        """`engines` to share, else it starts its own."""
        self._console, self._folder, self._engines, self._stack = console, folder, engines, ExitStack()
        self._head: Head | None = None
        self._exercises: dict[str, Exercise] = {}

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def meet(self, name: str) -> Judgement:
        """What is said of a drill with the defect `name` in the run that meets its fault."""
        defect = DEFECTS[name]
        changes = WHOLE if defect.whole else SMALL
        with uneven_streams() if defect.uneven else nullcontext():
            exercise = self._exercise(changes | {"skyrl.trainer.seed": 77} if defect.uneven else changes, defect.fault)
        with planted(name):
            return exercise.meet(exercise.schedule(None)).judgement

    def itself(self) -> Judgement:
        """Both baselines are one and the same run."""
        exercise = self._exercise(SMALL, KILL_RANK)
        both, exercise.baselines = exercise.baselines, (exercise.baselines[0],) * 2
        try:
            return exercise.meet(exercise.schedule(None)).judgement
        finally:
            exercise.baselines = both

    def clean(self, seed: int) -> Judgement:
        """Nothing planted; every second of them loses its driver, the others a rank. All are on one Ray cluster."""
        fault = (KILL_RANK, KILL_DRIVER)[seed % 2]
        exercise = self._exercise(SMALL | {"skyrl.trainer.seed": seed}, fault, self._started_head().address)
        return exercise.meet(exercise.schedule(None)).judgement

    def _started_head(self) -> Head:
        if self._head is None:
            self._stack.enter_context(variables(ON_LOOPBACK))
            self._head = Head(self._folder, {}, cpus=RANKS + 1, gpus=RANKS)
            self._stack.callback(self._head.kill)
            self._head.start()
        return self._head

    def _exercise(self, changes: dict[str, Any], fault: dict[str, Any], cluster: str | None = None) -> Exercise:
        told = {"run": "configs/test.yaml", "set": changes, "faults": [fault]}
        told |= {"expect": {"steps_repeated": 1, "recoveries": 0}}
        text = yaml.safe_dump(told, sort_keys=False)
        if text not in self._exercises:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"drill-{len(self._exercises)}.yaml"
            path.write_text(text)
            exercise = self._exercises[text] = Exercise(path, self._console, cluster=cluster)
            if self._engines is None:
                self._engines = self._stack.enter_context(EnginePool(exercise.config, self._folder / "logs"))
            exercise.prepare(self._engines)
        return self._exercises[text]
