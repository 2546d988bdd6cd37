"""How a process that we started ended, read from its exit code, its log, and what the kernel says."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from checkpointing.errors import HarnessError
from checkpointing.redaction import redactor

LINES = 20
_TAIL = 64 * 1024


def last_words(log: Path, environment: Mapping[str, str] = os.environ) -> str:
    """The error line that `harness.driver` ends with, for the journal, without secrets."""
    lines = _tail(log)
    errors = [line for line in lines if line.startswith("error:")]
    return redactor(environment)((errors or lines or ["no output"])[-1])[:500]


def last_lines(log: Path, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The last lines of `log`, for a journal that others read: without secrets."""
    redact = redactor(environment)
    return [redact(line)[:500] for line in _tail(log)[-LINES:]]


def says_error(log: Path, since: int) -> bool:
    """Whether there is the line that a driver says before it ends with an error (trainer/ending.py). `since`: bytes of
    `log` that are of others."""
    return any(line.startswith("error:") for line in _tail(log, since))


def _tail(log: Path, since: int = 0) -> list[str]:
    """Its last lines that are not blank; none if there is no log."""
    if not log.is_file():
        return []
    with log.open("rb") as file:
        file.seek(max(since, log.stat().st_size - _TAIL))
        text = file.read().decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()]


def first_dead(words: str, log: Path, scratch: Path) -> Path:
    """The log of the process that died first: the rank that `words` name as `(pid N)`, else the driver's own, `log`.

    A rank has a log of its own beside `log`. `scratch` is where the attempt's temporary files are: Ray keeps there what
    its workers say before.
    """
    match = re.search(r"\(pid (\d+)\)", words)
    logs = sorted(scratch.glob(f"**/logs/worker-*-{match[1]}.err")) if match else []
    logs += sorted(log.parent.glob(f"ranks-*-{match[1]}.log")) if match else []
    said = [path for path in logs if path.stat().st_size]
    return said[-1] if said else log


def as_error(code: int, reason: str) -> HarnessError:
    """The error class with this exit code, carrying the attempt's own words."""
    kinds: list[type[HarnessError]] = [kind for kind in HarnessError.__subclasses__() if kind.exit_code == code]
    return (kinds or [HarnessError])[0](reason.removeprefix("error: "))


def oom_kills(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Processes that the kernel has killed for want of memory, in our cgroup and those around it; 0 if it can't say."""
    counts = [0]
    for file in _counters(root, own):
        if file.is_file():
            found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
            counts.append(int(found[1]) if found else 0)
    return max(counts)


def _counters(root: Path, own: Path) -> Iterator[Path]:
    lines = own.read_text().splitlines() if own.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            folder = root / path.lstrip("/")
            yield from (above / "memory.events" for above in (folder, *folder.parents) if above.is_relative_to(root))
        elif "memory" in controllers.split(","):
            yield root / "memory" / path.lstrip("/") / "memory.oom_control"
            yield root / "memory" / "memory.oom_control"  # as a container sees its own
