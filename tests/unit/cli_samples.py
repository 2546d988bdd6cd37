"""The command line, called as from a shell."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

import pytest

from harness.cli import main


class Said(NamedTuple):
    code: int
    out: str
    err: str


def harness(*words: object) -> Said:
    """Run `harness` with `words`."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(out), redirect_stderr(err):
        patched.setattr(sys, "argv", ["harness", *map(str, words)])
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Said(code, out.getvalue(), err.getvalue())
