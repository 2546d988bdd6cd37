"""How a process that trained ends: one line for an error, its exit code, and no thread that keeps it alive."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from checkpointing.errors import HarnessError
from checkpointing.redaction import redacted


def end_process(work: Callable[[], None]) -> NoReturn:
    """Do `work`, then end this process: with 0, or with the error's code after a line that starts with "error:"."""
    code = 0
    try:
        work()
    except HarnessError as error:
        print(redacted(f"error: {error}"), file=sys.stderr)
        code = error.exit_code
    except Exception as error:
        print(redacted(f"{traceback.format_exc()}error: {type(error).__name__}: {error}"), file=sys.stderr)
        code = HarnessError.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    # SkyRL's client and Ray keep threads that hold the interpreter open after training is done, or has failed.
    os._exit(code)
