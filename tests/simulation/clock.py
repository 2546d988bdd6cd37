"""Virtual time, and processes whose threads take turns by it: one runs at a time, and which one is decided by the seed.

A thread of a simulated process is a real thread that waits for its turn. Whatever takes time puts it to sleep until a
moment of virtual time; whoever sleeps shortest goes on, and time with it. So a run takes as long as its computing does,
and the same seed gives the same order of events.
"""

import heapq
import threading
from collections.abc import Callable
from typing import Any, ClassVar


class Killed(BaseException):
    """The process dies here. No product code may catch it, and nothing that it still does has an effect."""


class Stuck(Exception):
    """Nothing in the world will ever happen again, and somebody still waits."""


MOST_SECONDS = 50_000.0
"""Of virtual time, after which a run is taken for one that never ends."""


class Process:
    """`code`: None while it lives, then its exit code, or minus the signal that ended it."""

    def __init__(self, clock: "Clock", name: str, pid: int, parent: "Process | None", env: dict[str, str]) -> None:
        self.clock, self.name, self.pid, self.parent, self.env = clock, name, pid, parent, env
        self.label = f"{name} {pid}"
        self.code: int | None = None
        self.words = ""
        self.attempt = 0
        self.chose_at = 0.0
        """When it began to look for the commit to resume from."""
        self.out_of_reach = False
        """A node that is cut off: signals don't arrive, and it may go on later."""
        self.given_up = False
        """Whoever runs the cluster has told everybody that this one is dead, which may not be true."""
        self.paused = False
        self.threads: list[Thread] = []
        self.watchers: list[Callable[[str, dict[str, Any]], None]] = []
        self.signals: dict[int, Callable[[], None]] = {}

    def end(self, code: int) -> None:
        """It is gone, with all its threads. If the calling one is among them this does not return."""
        if self.clock.current.process.code is not None:
            raise Killed  # the dead end nobody, whatever they do on their way out
        if self.code is not None:
            return
        self.code = code
        for thread in self.threads:
            if thread is not self.clock.current:
                self.clock.unwind(thread)
        self.clock.wake_all()
        if self.clock.current.process is self:
            raise Killed


class _Hand:
    """A real thread, used again and again, as starting one takes longer than most of them have to do."""

    idle: ClassVar[list["_Hand"]] = []

    def __init__(self) -> None:
        self.baton = threading.Lock()
        self.baton.acquire()
        self.work: Callable[[], None]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.baton.acquire()
            self.work()


class Thread:
    def __init__(self, process: Process, work: Callable[[], None]) -> None:
        self.process, self._work = process, work
        self._hand = _Hand.idle.pop() if _Hand.idle else _Hand()
        self._hand.work, self.baton = self._body, self._hand.baton
        self.ticket = 0
        self.ready: Callable[[], bool] | None = None
        self.end: float | None = None
        """What it waits for, and until when."""
        self.over = False
        self.heir: Thread | _Outside | None = None
        self.seen: dict[str, int] = {}
        """{tier: newest attempt there when this thread last looked}, until it changes something: see invariants.py."""
        process.threads.append(self)

    def looks_in_vain(self) -> bool:
        """It waits, and would do nothing with its turn but wait on."""
        if self.ready is None or self.process.code is not None or self.ready():
            return False
        return self.end is None or self.process.clock.now < self.end

    def _body(self) -> None:
        clock = self.process.clock
        try:
            if self.process.code is None:
                self._work()
        except Killed:
            pass
        except BaseException as error:
            clock.failed(error)
        self.over = True
        _Hand.idle.append(self._hand)
        if self.heir is not None:
            clock.current = self.heir
            self.heir.baton.release()
        else:
            clock.hand_over()


class _Outside:
    """Whoever called `Clock.run`, while what is left is ended."""

    def __init__(self) -> None:
        self.baton = threading.Lock()
        self.baton.acquire()


class Clock:
    """`now`: seconds since the run began. `skew`: how wrong the wall clock is."""

    def __init__(self) -> None:
        self.now, self.skew = 0.0, 0.0
        self._heap: list[tuple[float, int, Thread]] = []
        self._tickets = 0
        self._waiting: dict[Thread, None] = {}
        self._over = threading.Lock()
        self._over.acquire()
        self.failure: BaseException | None = None
        self.everyone: list[Thread] = []
        self.current: Any = None
        self._stopped = False

    def start(self, process: Process, work: Callable[[], None]) -> Thread:
        thread = Thread(process, work)
        self.everyone.append(thread)
        self._queue(thread, self.now)
        return thread

    def run(self) -> None:
        """Until nothing is left to happen, or something has failed. Raises what failed."""
        self.hand_over()
        self._over.acquire()
        me = _Outside()
        for thread in self.everyone:
            thread.process.code = -9 if thread.process.code is None else thread.process.code
        for thread in self.everyone:
            self.current = me
            self.unwind(thread)
        if self.failure is not None:
            raise self.failure

    def count(self) -> int:
        """A number higher than all before."""
        self._tickets += 1
        return self._tickets

    def stop(self) -> None:
        """Nobody has a turn any more once the calling thread has ended."""
        self._stopped = True

    def failed(self, error: BaseException) -> None:
        self.failure = self.failure or error

    def unwind(self, thread: Thread) -> None:
        """Let a thread of a dead process leave whatever it was in."""
        if thread.over:
            return
        me = self.current
        thread.heir, self.current = me, thread
        thread.baton.release()
        me.baton.acquire()

    def sleep(self, seconds: float) -> None:
        me = self.current
        if me.process.code is not None:
            raise Killed
        if me.process.paused:
            self._waiting[me] = None
        else:
            moment = self.now + seconds
            if (not self._heap or moment < self._heap[0][0]) and moment < MOST_SECONDS:
                self.now = moment
                return
            self._queue(me, moment)
        self._park(me)

    def wait(self, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """Until `ready`, for which whoever changes something calls `wake_all`; at most `seconds`. Whether it is."""
        end = None if seconds is None else self.now + seconds
        me = self.current
        if ready():
            return True
        if end is not None and self.now >= end:
            return False
        if me.process.code is not None:
            raise Killed
        me.ready, me.end = ready, end
        self._wait_on(me)
        self._park(me)
        me.ready = None
        return ready()

    def _wait_on(self, thread: Thread) -> None:
        self._waiting.pop(thread, None)
        self._waiting[thread] = None
        if thread.end is not None and not thread.process.paused:
            self._queue(thread, thread.end)

    def wake_all(self) -> None:
        """Whoever waits looks again."""
        for thread in list(self._waiting):
            if not thread.process.paused:
                self._queue(thread, self.now)

    def pause(self, process: Process) -> None:
        """Its threads stand still, wherever they are, until `go_on`."""
        process.paused = True
        for thread in process.threads:
            if thread is not self.current and not thread.over:
                thread.ticket = 0
                self._waiting[thread] = None

    def go_on(self, process: Process) -> None:
        process.paused = False
        self.wake_all()

    def _queue(self, thread: Thread, moment: float) -> None:
        self._tickets += 1
        thread.ticket = self._tickets
        heapq.heappush(self._heap, (moment, self._tickets, thread))

    def _park(self, me: Thread) -> None:
        self.hand_over()
        me.baton.acquire()
        self._waiting.pop(me, None)
        if me.process.code is not None:
            raise Killed

    def hand_over(self) -> None:
        while self._heap and self.failure is None and not self._stopped:
            moment, ticket, thread = heapq.heappop(self._heap)
            if thread.ticket != ticket or thread.over:
                continue
            self.now = max(self.now, moment)
            if self.now > MOST_SECONDS:
                self.failed(Stuck("progress: the run does not come to an end"))
                break
            if thread.looks_in_vain():  # asked here, as it costs far less than its turn
                self._wait_on(thread)
                continue
            self.current = thread
            thread.baton.release()
            return
        if (
            not self._stopped
            and self.failure is None
            and any(not thread.over and not thread.process.paused for thread in self._waiting)
        ):
            self.failure = Stuck("nothing will ever happen again, and somebody still waits")
        self._over.release()
