"""SIGTERM, in the driver: where it leaves training, what it does not cut off, and who must not die of it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from checkpointing.errors import Preempted
from harness.stopping import STOP_FILE, StopRequest
from trainer.data import EpochLoader

DRIVER = """
import asyncio, os, signal, sys, threading
from checkpointing.phases import reached
from trainer.ending import end_process
from trainer.stopping import Stopping

stopping = Stopping()
stopping.listen()
sigterm = lambda: os.kill(os.getpid(), signal.SIGTERM)
say = lambda *words: print(*words, flush=True)

async def train():
{body}

def work():
    try:
        asyncio.run(stopping.unless_asked(train()))
    finally:
        say("asked", stopping.asked)
{before}
end_process(work)
"""


def drive(body: str, before: str = "") -> tuple[int, list[str], str]:
    """(exit code, lines said, error)"""
    code = DRIVER.format(body="\n".join(f"    {line}" for line in body.splitlines()), before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr.strip()


def test_nobody_asks() -> None:
    assert drive("reached('generate.begin', step=1)\nawait asyncio.sleep(0)") == (0, ["asked False"], "")


def test_before_training_it_ends_at_once() -> None:
    code, said, error = drive("say('trained')", before="sigterm()")
    assert (code, said, error) == (75, [], "error: stopped as asked while nothing was trained")


def test_between_two_attempts_it_ends_at_once() -> None:
    """While ranks are rebuilt nothing is awaited that could be cut short."""
    body = "stopping.nothing_to_lose()\nsay('rebuilding')\nsigterm()\nsay('went on')"
    assert drive(body) == (75, ["rebuilding"], "error: stopped as asked while nothing was trained")
    body = "sigterm()\nstopping.nothing_to_lose()\nsay('went on')"
    assert drive(body) == (75, [], "error: stopped as asked while nothing was trained")


@pytest.mark.parametrize(
    "place", ["evaluate.begin", "generate.request", "reward.begin", "forward.begin", "train.begin"]
)
def test_a_phase_that_would_be_done_again_is_left(place: str) -> None:
    code, said, error = drive(f"sigterm()\nreached('{place}', step=2)\nsay('went on')")
    assert (code, said) == (Preempted.exit_code, ["asked True"])
    assert error.splitlines()[-1] == f"error: left at {place}"


def test_an_optimizer_step_that_has_begun_is_finished() -> None:
    body = "sigterm()\nfor place in ('step.trained', 'save.begin'):\n    reached(place, step=2)\nsay('saved')\n"
    code, said, error = drive(body + "reached('weight_sync.begin', step=2)\nsay('synced')")
    assert (code, said, error.splitlines()[-1]) == (75, ["saved", "asked True"], "error: left at weight_sync.begin")


def test_a_wait_is_cut_short() -> None:
    """Read only at step boundaries, the flag was seen in 0 of 6 preemptions (spd #677)."""
    body = "asyncio.get_running_loop().call_later(0.1, sigterm)\ntry:\n    await asyncio.sleep(600)\n"
    code, said, error = drive(body + "except Exception:\n    say('swallowed')")
    assert (code, said, error.splitlines()[-1]) == (75, ["asked True"], "error: left while waiting")


def test_a_save_behind_training_is_not_cut_off() -> None:
    body = (
        "save = threading.Thread(target=lambda: (reached('save.before_commit', step=1), say('committed')))\n"
        "sigterm()\nsave.start()\nsave.join()\nreached('generate.begin', step=2)"
    )
    assert drive(body)[1] == ["committed", "asked True"]


def test_after_another_library_has_taken_the_signal() -> None:
    before = "signal.signal(signal.SIGTERM, lambda *_: say('theirs'))\nstopping.hear()"
    code, said, _ = drive("sigterm()\nreached('generate.begin', step=2)", before=before)
    assert (code, said) == (75, ["asked True"])


IGNORING = """
import os, signal, threading
from trainer.stopping import ignore_sigterm
signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
thread = threading.Thread(target=ignore_sigterm)
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGTERM)
print("alive", flush=True)
"""


def test_a_rank_ignores_it_also_where_ray_runs_it_in_another_thread() -> None:
    done = subprocess.run([sys.executable, "-c", IGNORING], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n")


class Pids:
    """Prompts that say which process fetched them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.getpid()

    def collate_fn(self, items: list[int]) -> list[int]:
        return items


def test_loader_workers_outlive_a_signal_to_the_group() -> None:
    """They died of it, and took the process that was to save along (KempnerForge #177)."""
    loader = EpochLoader(Pids(), 2, 1, seed=7, num_workers=1)
    batches = iter(loader)
    worker = next(batches)[0]
    assert worker != os.getpid()
    os.kill(worker, signal.SIGTERM)
    assert [batch[0] for batch in batches] == [worker] * 3


def test_the_supervisor_hears_signals_and_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    (tmp_path / STOP_FILE).touch()
    before = signal.getsignal(signal.SIGINT)
    with StopRequest(tmp_path, grace_seconds=60) as stop:
        assert not stop.asked and not stop.over, "the file was meant for a supervisor before this one"
        (tmp_path / STOP_FILE).touch()
        assert stop.asked and not stop.over
        now += 61
        assert stop.over
    assert not (tmp_path / STOP_FILE).exists()
    for number in (signal.SIGTERM, signal.SIGINT):
        with StopRequest(tmp_path, grace_seconds=60) as stop:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            assert stop.asked and not stop.over, "to the process and to its group is one request"
            now += 2
            os.kill(os.getpid(), number)
            assert stop.over, "asked again: at once"
    assert signal.getsignal(signal.SIGINT) == before
