"""Locks, events, futures and pools of threads, as product code knows them, in virtual time."""

from collections.abc import Callable, Iterable
from typing import Any

from .clock import Clock, Process


class Lock:
    def __init__(self, clock: Clock) -> None:
        self._clock, self._held = clock, False

    def __enter__(self) -> None:
        self._clock.wait(lambda: not self._held)
        self._held = True

    def __exit__(self, *_: object) -> None:
        self._held = False
        if self._clock.current.process.code is None:
            self._clock.wake_all()


class Event:
    def __init__(self, clock: Clock) -> None:
        self._clock, self._set = clock, False

    def set(self) -> None:
        self._set = True
        self._clock.wake_all()

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        return self._clock.wait(self.is_set, timeout)


class Future:
    """What a thread of `process` will have returned; `lost` is raised once that process is dead without having."""

    def __init__(self, clock: Clock, process: Process, lost: Callable[[], Exception]) -> None:
        self._clock, self._process, self._lost = clock, process, lost
        self.number = clock.count()
        self._finished = False
        self._value: Any = None
        self._error: Exception | None = None

    def work(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            self._value = function(*args)
        except Exception as error:
            self._error = error
        self._finished = True
        self._clock.wake_all()

    def done(self) -> bool:
        return self._finished or self._process.code is not None

    def result(self, timeout: float | None = None) -> Any:
        if not self._clock.wait(self.done, timeout):
            raise TimeoutError
        if not self._finished:
            raise self._lost()
        if self._error is not None:
            raise self._error
        return self._value


class Executor:
    """As `ThreadPoolExecutor`, for the calling process; `workers` that is 1 keeps the order."""

    def __init__(self, clock: Clock, workers: int) -> None:
        self._clock, self._one = clock, workers == 1
        self._before: Future | None = None

    def submit(self, function: Callable[..., Any], *args: Any) -> Future:
        clock, before = self._clock, self._before if self._one else None
        self._before = future = Future(clock, clock.current.process, lambda: RuntimeError("own process is dead"))

        def work() -> None:
            if before is not None:
                clock.wait(before.done)
            future.work(function, *args)

        clock.start(clock.current.process, work)
        return future

    def map(self, function: Callable[..., Any], *items: Iterable[Any]) -> list[Any]:
        return [function(*args) for args in zip(*items, strict=True)]

    def __enter__(self) -> "Executor":
        return self

    def __exit__(self, *_: object) -> None:
        pass
