"""A process that trained always ends, with the right code and one line, whatever threads it has left."""

import subprocess
import sys

import pytest

CODE = """
import threading, time
from checkpointing.errors import ConfigError
from trainer.ending import end_process
threading.Thread(target=time.sleep, args=(600,)).start()
def work():
    print("said before")
    {statement}
end_process(work)
"""


@pytest.mark.parametrize(
    ("statement", "code", "last_line"),
    [
        ("pass", 0, None),
        ("raise ConfigError('what and where')", 10, "error: what and where"),
        ("raise KeyError('a bug')", 1, "error: KeyError: 'a bug'"),
    ],
)
def test_it_ends(statement: str, code: int, last_line: str | None) -> None:
    command = [sys.executable, "-c", CODE.format(statement=statement)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == code
    assert result.stdout == "said before\n"
    assert result.stderr.splitlines()[-1:] == ([last_line] if last_line else [])
