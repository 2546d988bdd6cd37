"""One curve per run in the user's metrics logger, however many attempts it took.

Loggers lose what they had not written when a process is killed, and refuse or repeat the steps that are run again from
a checkpoint. So the journal is the truth: metrics go there first, then to the logger. An attempt asks the logger what
it holds, feeds it what it lacks, in order, and keeps repeated steps from it: the first value of a metric counts.
"""

import logging
import os
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, SupportsFloat

import psutil
from skyrl.train.config import get_config_as_dict
from skyrl.train.utils.callbacks import CallbackInput, TrainingCallback, TrainingControl
from skyrl.train.utils.tracking import Tracking

from checkpointing.errors import WorkerLost
from checkpointing.events import AttemptStarted, Evaluated, MetricsLogged, RunStarted
from checkpointing.journal import Record, read_journal
from trainer.run import Run
from trainer.wandb_files import last_step

NOTHING = -1
"""The last step of a logger that holds none. Step 0 is the evaluation before training."""

Metrics = dict[str, Any]

_log = logging.getLogger(__name__)


def _is_number(value: Any) -> bool:
    return isinstance(value, SupportsFloat) and not getattr(value, "shape", ())


def journaled(records: list[Record]) -> dict[int, Metrics]:
    """{step: metrics} as logged so far, by the rule of `MetricsLogged`."""
    rows: dict[int, Metrics] = {}
    for _, attempt in groupby(records, lambda record: record.attempt):
        own: dict[int, Metrics] = {}
        for event in (record.event for record in attempt):
            if isinstance(event, MetricsLogged | Evaluated):
                own.setdefault(event.step, {}).update(event.metrics)
        for step, metrics in own.items():
            rows[step] = metrics | rows.get(step, {})
    return rows


class ContinuedTracking(Tracking):
    """SkyRL's tracker, which begins where the attempts before have left the logger.

    wandb goes on with the run that is named after ours. TensorBoard's event files lie in one folder. MLflow and SwanLab
    begin a run of their own in each process, and it gets the whole curve. The console gets what this attempt does.

    Raises:
        WorkerLost: wandb's server does not answer; another attempt may reach it.
    """

    def __init__(self, run: Run, cfg: Any) -> None:
        self.run = run
        records = read_journal(run.directory)
        self.run_id = next(r.event.run_id for r in records if isinstance(r.event, RunStarted))
        self._pids = {r.event.pid for r in records if isinstance(r.event, AttemptStarted)}
        self._before = journaled(records)
        self._unsent: dict[int, Metrics] = {}  # of this attempt
        self._held: dict[str, int] = {}  # {metric: last step of it in the logger}
        self._held_whole = NOTHING  # up to here the logger holds every metric
        self._failing, self._local = False, False
        trainer = cfg.trainer
        match trainer.logger:
            case "wandb":
                self._begin("wandb", self._wandb(cfg))
            case "tensorboard":
                folder = Path(os.environ.get("TENSORBOARD_DIR") or run.directory / "tensorboard")
                self._held = tensorboard_steps(folder, self.run_id)
                self._local = True
                self._begin("tensorboard", _EventFile(folder, self.run_id))
            case backend:
                super().__init__(trainer.project_name, trainer.run_name, backend, cfg, trainer.tags)
                if backend == "console":
                    self._before = {}

    def _begin(self, backend: str, logger: Any) -> None:
        """What SkyRL's `__init__` leaves behind."""
        self.backend, self.logger, self._exception_logged = backend, logger, False

    def _wandb(self, cfg: Any) -> Any:
        import wandb

        end_orphaned_services(self._pids)
        try:
            opened = wandb.init(
                project=cfg.trainer.project_name,
                name=cfg.trainer.run_name,
                tags=cfg.trainer.tags,
                config=get_config_as_dict(cfg),
                id=os.environ.get("WANDB_RUN_ID") or self.run_id,
                resume="allow",
                dir=os.environ.get("WANDB_DIR") or self.run.directory,
            )
            self._held_whole = opened.step - 1  # as the server knows it
        except wandb.errors.AuthenticationError:
            raise
        except (wandb.errors.CommError, TimeoutError) as error:
            raise WorkerLost(f"wandb does not answer: {error}") from error
        self._local = opened.offline
        if self._local:
            self._held_whole = last_step(Path(opened.settings.wandb_dir), opened.id)
        return _WholeRows(wandb)

    def go_on(self, run: Run) -> None:
        """The next attempt begins in this process: what the logger was told stays told."""
        self.run, self._unsent = run, {}
        if self.backend == "console":
            self._held = {}
        else:
            self._before = journaled(read_journal(run.directory))
        if self.backend == "wandb":
            self._held_whole = max(self._held_whole, *self._held.values(), NOTHING)

    def log(self, data: Metrics, step: int, commit: bool = False) -> None:
        """Journal metrics of a step, then send what the logger lacks. Without `commit`, more of this step will follow.

        Values that are not numbers are not journaled; wandb and the console get them all the same.

        Raises:
            StoreError: storage refused the journal.
        """
        numbers = {name: float(value) for name, value in data.items() if _is_number(value)}
        row = self._unsent.get(step, {})
        new = {name: value for name, value in numbers.items() if name not in row or row[name] is not data[name]}
        if new:
            self.run.journal.append(MetricsLogged(step=step, metrics=new))
        self._unsent[step] = row | (data if self.backend in ("wandb", "console") else {n: data[n] for n in numbers})
        self._send(step if commit else step - 1)

    def _send(self, last: int) -> None:
        """Send every step up to `last` that the logger lacks, in order. If it fails they are sent later, at worst by an
        attempt that finds them in the journal: no logger stops a run."""
        try:
            for step in sorted(step for step in self._before.keys() | self._unsent.keys() if step <= last):
                row = self._unsent.get(step, {}) | self._before.get(step, {})
                lacking = {name: v for name, v in row.items() if step > self._held.get(name, self._held_whole)}
                if lacking:
                    super().log(lacking, step, commit=True)
                self._held |= dict.fromkeys(lacking, step)
                self._unsent.pop(step, None)
                self._before.pop(step, None)
        except Exception as error:
            if not self._failing:
                _log.warning("%s failed, metrics wait in the journal: %r", self.backend, error)
            self._failing = True
        else:
            self._failing = False

    def log_samples_to_table(self, key: str, columns: list[str], samples: list[tuple[Any, ...]], step: int) -> None:
        """As SkyRL's, unless the logger is past that step. Tables are not journaled."""
        if step > self._held_whole:
            super().log_samples_to_table(key, columns, samples, step)

    def finish(self) -> None:
        """The run is complete: send all that the logger lacks, and close it."""
        self._send(max(self._before.keys() | self._unsent.keys(), default=NOTHING))
        super().finish()

    def leave(self) -> None:
        """The attempt ends, the run perhaps not. Files are closed; a server, which may not answer, is not waited for:
        it hears the rest from the next attempt."""
        if self._local:
            super().finish()

    def __del__(self) -> None:
        """Not SkyRL's, which would call a run finished that another attempt goes on with."""


class MetricsAtStepEnd(TrainingCallback):
    """SkyRL logs a step after it is saved. What is known before goes to the journal before, or a kill between the two
    would leave a step that no attempt runs again and no logger has heard of."""

    def on_step_end(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        trainer.tracker.log(trainer.all_metrics, step=trainer.global_step, commit=False)


class _WholeRows:
    """The wandb module, but what belongs to one step is sent at once.

    A row of tables alone, which wandb writes when it is closed, would pass for the whole step.
    """

    def __init__(self, wandb: Any) -> None:
        self._wandb = wandb
        self._tables: dict[int, Metrics] = {}

    def log(self, data: Metrics, step: int | None = None, commit: bool | None = None) -> None:
        if step is not None and not commit:
            self._tables.setdefault(step, {}).update(data)
        else:
            tables = {} if step is None else self._tables.pop(step, {})
            self._wandb.log(tables | data, step=step, commit=commit)

    def finish(self, exit_code: int) -> None:
        self._wandb.finish(exit_code=exit_code)


class _EventFile:
    """TensorBoard's, with the run's id in its name: the user's TENSORBOARD_DIR may hold other runs."""

    def __init__(self, folder: Path, run_id: str) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(folder, filename_suffix=f".{run_id}")

    def log(self, data: Metrics, step: int) -> None:
        for name, value in data.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


def tensorboard_steps(folder: Path, run_id: str) -> dict[str, int]:
    """{metric: last step} in the run's event files, as far as they can be read: a kill tears their ends."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found: dict[str, int] = {}
    for path in folder.glob(f"*.{run_id}"):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found[value.tag] = max(found.get(value.tag, NOTHING), event.step)
    return found


def end_orphaned_services(drivers: set[int]) -> None:
    """End the wandb services of these drivers (pids) that are dead.

    A service leads a session of its own and outlives its driver by seconds. Meanwhile it would go on writing to the
    run that the next attempt resumes.
    """
    orphans = []
    for process in psutil.process_iter(["cmdline", "ppid"]):
        command = process.info["cmdline"] or [""]
        if Path(command[0]).name == "wandb-core" and "--pid" in command:
            driver = int(command[command.index("--pid") + 1])
            if driver in drivers and process.info["ppid"] != driver:
                orphans.append(process)
    for process in orphans:
        with suppress(psutil.Error):  # gone, or not ours to end
            process.kill()
    psutil.wait_procs(orphans, timeout=10)
