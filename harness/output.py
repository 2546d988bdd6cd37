"""What the commands print: lines, tables, and how long ago something was."""

import time
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def say(console: Console, text: str) -> None:
    """As it stands: paths may hold what rich takes for markup."""
    console.print(text, markup=False, highlight=False)


def show_table(console: Console, names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(*names)
    for row in rows:
        table.add_row(*map(Text, row))
    if not console.is_terminal:
        console = Console(file=console.file, width=1000)  # one line a row, for whatever reads it
    console.print(table, soft_wrap=False)


def age(moment: float | None) -> str:
    """How long ago the Unix time `moment` was."""
    return "-" if moment is None else duration(max(0.0, time.time() - moment))


def duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
