"""Asked to stop by SIGTERM (preemption, `kubectl delete`): the driver ends with `Preempted` where it loses least.

Before training there is nothing to lose, so the process ends at once. While SkyRL's loop waits for engines or ranks the
wait is cut short; between phases whose work would be done again anyway the loop is left there; and an optimizer step
that has begun is finished. What then still is to be saved, `Saver.last` saves.
"""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, NoReturn

from checkpointing.errors import Preempted
from checkpointing.phases import watch

_LEAVE_AT = frozenset(
    {
        "restore.begin",
        "restore.end",
        "evaluate.begin",
        "generate.begin",
        "generate.request",
        "reward.begin",
        "forward.begin",
        "train.begin",
        "weight_sync.begin",
        "weight_sync.end",
    }
)
"""All in the driver's own thread. Nothing that the step before left behind has changed by then, but for what
`Saver.remember` has copied."""

_SIG_IGN = 1


def ignore_sigterm(*_: Any) -> None:
    """For a process that the driver ends itself: whoever signals the whole group means the driver.

    Set in the C library, as `signal.signal` works in a process's main thread alone and Ray runs actors in others.
    """
    ctypes.CDLL(None).signal(int(signal.SIGTERM), _SIG_IGN)


class Stopping:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self.asked = False
        self._training = False
        self._cut_short: Callable[[], object] = lambda: None

    def listen(self) -> None:
        """From now on hear SIGTERM, and leave training at the next place that allows it. Call from the main thread."""
        self.hear()
        watch(self._leave)

    def hear(self) -> None:
        """Once more where another library has taken SIGTERM for itself."""
        signal.signal(signal.SIGTERM, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if not self._training:
            self._end()
        self._cut_short()

    def _end(self) -> NoReturn:
        print("error: stopped as asked while nothing was trained", file=sys.stderr, flush=True)
        os._exit(Preempted.exit_code)

    def nothing_to_lose(self) -> None:
        """Between two attempts: everything that could be saved is. Ends the process if it was asked to stop."""
        self._training = False
        if self.asked:
            self._end()

    def _leave(self, name: str, where: dict[str, Any]) -> None:
        if self.asked and name in _LEAVE_AT:
            raise Preempted(f"left at {name}")

    async def unless_asked(self, work: Coroutine[Any, Any, None]) -> None:
        """Train: run `work` to its end.

        Raises:
            Preempted: asked to stop meanwhile.
        """
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        self._cut_short = lambda: loop.call_soon_threadsafe(task.cancel)
        self._training = True
        try:
            await task
        except asyncio.CancelledError:
            raise Preempted("left while waiting") from None
        finally:
            self._cut_short = lambda: None
