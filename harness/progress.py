"""A progress bar drawn from the journal, so it shows what is durable and nothing else."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from checkpointing.events import AttemptStarted, RunStarted, StepDone
from checkpointing.journal import JournalFollower


class RunProgress:
    """Call `update` now and then; use as a context manager around a supervised run."""

    def __init__(self, run_dir: Path, console: Console, label: str) -> None:
        self.journal = JournalFollower(run_dir)
        self.planned = self.attempts = 0
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[facts]}"), TimeElapsedColumn(),
            console=console,
        )  # fmt: skip
        self.task = self.bar.add_task(label, total=None, facts="starting")

    def __enter__(self) -> "RunProgress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.update()
        self.bar.stop()

    def update(self) -> None:
        for record in self.journal.new():
            event = record.event
            if isinstance(event, RunStarted):
                self.planned = event.planned_steps
                self.bar.update(self.task, total=self.planned)
            elif isinstance(event, AttemptStarted):
                self.attempts += 1
            elif isinstance(event, StepDone):
                self._show(event)

    def _show(self, step: StepDone) -> None:
        reward = float.fromhex(step.scalars["reward/avg_raw_reward"])
        loss = float.fromhex(step.scalars["policy_loss"])
        facts = f"step {step.step}/{self.planned}  reward {reward:.3f}  loss {loss:+.4f}  {step.seconds:.1f} s/step"
        self.bar.update(self.task, completed=step.step, facts=f"{facts}  attempt {self.attempts}")
