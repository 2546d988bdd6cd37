"""A progress bar drawn from the journal, so it shows what is durable and nothing else."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from checkpointing.events import AttemptStarted, RunStarted, StepDone
from checkpointing.journal import read_journal


class RunProgress:
    """Call `update` now and then; use as a context manager around a supervised run."""

    def __init__(self, run_dir: Path, console: Console, label: str) -> None:
        self.run_dir = run_dir
        self.label = label
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
        events = [record.event for record in read_journal(self.run_dir)]
        planned = [event.planned_steps for event in events if isinstance(event, RunStarted)]
        attempts = sum(isinstance(event, AttemptStarted) for event in events)
        steps = [event for event in events if isinstance(event, StepDone)]
        if not steps:
            return
        last = steps[-1]
        reward = float.fromhex(last.scalars["reward/avg_raw_reward"])
        loss = float.fromhex(last.scalars["policy_loss"])
        facts = f"step {last.step}/{planned[0] if planned else '?'}  reward {reward:.3f}  loss {loss:+.4f}  "
        facts += f"{last.seconds:.1f} s/step  attempt {attempts}"
        self.bar.update(self.task, total=planned[0] if planned else None, completed=last.step, facts=facts)
