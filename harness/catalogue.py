"""`harness faults`: the catalogue."""

from rich.console import Console

from chaos.faults import catalogue
from harness.output import show_table


def show_faults(console: Console, as_json: bool) -> None:
    listed = catalogue()
    if as_json:
        console.print_json(data=[one._asdict() for one in listed])
        return
    rows = [(one.name, one.kind, one.what, f"no: {one.unavailable}" if one.unavailable else "yes") for one in listed]
    show_table(console, ("fault", "breaks", "what happens", "here"), rows)
