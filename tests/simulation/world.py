"""The world that a run lives in: its clock, disk, object stores and processes, put under the product's own modules.

One world exists at a time, as it replaces names in modules. What product code reaches for, from `os` to `time.sleep`,
is listed in `replaced`; everything else of it runs as it is.
"""

import contextlib
import functools
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tenacity
import tenacity.nap
import tenacity.wait

import checkpointing.commit
import checkpointing.disk
import checkpointing.journal
import checkpointing.manifest
import checkpointing.phases
import checkpointing.progress
import checkpointing.records
import checkpointing.redaction
import checkpointing.replicator
import checkpointing.stores.posix
import checkpointing.stores.s3
import checkpointing.verification
from checkpointing.errors import HarnessError
from checkpointing.stores.s3_errors import Transient

from .clock import Clock, Killed, Process, Thread
from .disk import STORE, Disk, Path
from .faults import Schedule
from .injection import inject
from .invariants import Invariants, Violation
from .objects import Latency, Objects, Obstore, connect
from .system import System
from .waiting import Event, Executor, Future, Lock

START = 1_800_000_000.0
"""Unix time at which every run begins."""
MOST_POINTS = 20_000
"""After so many a run is taken for one that never ends."""


_known = {name: functools.lru_cache(10_000)(getattr(checkpointing.records, name)) for name in ("decode", "unseal")}
"""Functions of bytes, and given the same ones again and again: what they have found out they do not find out twice."""


class _Retrying(tenacity.Retrying):
    """Tenacity, which sees a call only once it has failed: what it does about each takes longer than the call here."""

    def __call__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except Transient as error:
            failed = [error]

        def again() -> Any:
            if failed:
                raise failed.pop()
            return fn(*args, **kwargs)

        return super().__call__(again)


class World:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.rng = random.Random(f"world {schedule.seed}")
        self.clock = Clock()
        self.disk = Disk(self.point, self._disk_changed, self._disk_looked, self.time.time)
        self.system = System(self.disk, lambda: self.clock.current.process)
        latency = Latency(self.clock, self.rng)
        names = [tier for tier in schedule.tiers if tier != "file"]
        self.buckets = {
            self.bucket_of(name): Objects(name, self.point, self._object_changed, self._object_looked, latency)
            for name in names
        }
        self.model = Invariants(self.clock, self.disk, STORE, schedule.tiers, schedule.backlog)
        self.model.away = self._was_away
        self.trace: list[tuple[float, str, str]] = []
        self.processes: list[Process] = []
        self._counts: Counter[str] = Counter()
        self._due = {(fault.place, fault.number): fault for fault in reversed(schedule.faults)}
        self.faults_end = False
        self.rank_lost = False
        """The next phase of a step fails as it does when a rank has died."""

    @staticmethod
    def bucket_of(tier: str) -> str:
        return f"bucket-{tier}"

    # Processes

    def start(
        self, name: str, work: Callable[[], int], parent: Process | None, env: dict[str, str] | None = None
    ) -> Process:
        """A process that does `work` and ends with what that returns, or with the code of the error that it raises."""
        process = Process(self.clock, name, 1000 + len(self.processes), parent, env or {})
        self.processes.append(process)

        def body() -> None:
            try:
                code = work()
            except HarnessError as error:
                process.words, code = f"error: {error}", error.exit_code
            self.note("ended", f"with {code} {process.words}".splitlines()[0])
            process.end(code)

        self.clock.start(process, body)
        return process

    def family(self, process: Process) -> list[Process]:
        """It and all that it has started, and so on."""
        found = [process]
        for other in self.processes:
            if other.parent in found:
                found.append(other)
        return found

    def kill(self, process: Process, everyone: bool = False) -> None:
        """SIGKILL to it, or to it and its family, as far as they can be reached."""
        mine = self.clock.current.process
        targets = self.family(process) if everyone else [process]
        for one in sorted(targets, key=lambda one: one is mine):
            if one.code is None and (not one.out_of_reach or mine.out_of_reach):
                self.note("killed", one.name)
                one.end(-signal.SIGKILL)

    def living(self, name: str) -> Process | None:
        return next((one for one in reversed(self.processes) if one.name == name and one.code is None), None)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Not done by any process of the run, and not undone by what becomes of them."""

        def work() -> int:
            self.clock.sleep(seconds)
            act()
            return 0

        process = Process(self.clock, "nature", 1, None, {})
        self.clock.start(process, lambda: self.ignore(work()))

    @staticmethod
    def ignore(_: object) -> None:
        pass

    # What happens

    def note(self, what: str, where: str) -> None:
        current = self.clock.current
        name = current.process.label if isinstance(current, Thread) else "-"
        self.trace.append((self.clock.now, name, f"{what} {where}"))

    def point(self, name: str, seconds: float) -> None:
        """The current process is at `name`, where it may die; then `seconds` pass."""
        process = self.clock.current.process
        if process.code is not None:
            raise Killed
        self.trace.append((self.clock.now, process.label, name))
        if len(self.trace) > MOST_POINTS:
            raise Violation("progress: the run does not come to an end")
        if process.name != "nature":
            self._counts[name] += 1
            self._counts[""] += 1
            for place in (name, ""):
                fault = self._due.pop((place, self._counts[place]), None) if self._due else None
                if fault is not None and not self.faults_end:
                    inject(self, fault, process)
        self.clock.sleep(seconds)

    def reached(self, name: str, where: dict[str, Any]) -> None:
        process = self.clock.current.process
        for watcher in process.watchers:
            watcher(name, where)
        if name == "save.committed" and process.code is None:
            self.model.acknowledged.add(f"commits/{where['step']:010d}-{process.attempt:06d}.json")
        self.point(name, 0.0)

    def _was_away(self) -> bool:
        return any(bucket.was_away for bucket in self.buckets.values())

    def poisoned(self, phase: str, step: int) -> str | None:
        """How the step that the driver is at fails here, if it does."""
        poison = self.schedule.poison
        if poison is None or poison.phase != phase or step not in (0, poison.step):
            return None
        self._counts["poison"] += 1
        if poison.times and self._counts["poison"] > poison.times:
            return None
        self.note("POISON", poison.kind)
        return poison.kind

    def heal(self) -> None:
        """Everything that is wrong with storage is over, and nothing more goes wrong."""
        self.faults_end = True
        self.disk.refuses = None
        self.clock.skew = 0.0
        for bucket in self.buckets.values():
            bucket.down_until = bucket.denied_until = bucket.slow_until = 0.0
            bucket.errors = bucket.lost = bucket.lost_creates = 0
            bucket.late = []

    def _disk_changed(self, path: str) -> None:
        if path.startswith(f"{STORE}/") and "/." not in path:
            node = self.disk.find(path)
            data = None if node is None else bytes(node.data)  # type: ignore[union-attr]
            self.model.changed("file", path[len(STORE) + 1 :], data, self.clock.current)

    def _disk_looked(self, path: str) -> None:
        if path == f"{STORE}/attempts":
            self.model.looked("file")

    def _object_changed(self, tier: str, path: str) -> None:
        thread = self.clock.current
        data = self.buckets[self.bucket_of(tier)].objects.get(path)
        if path.startswith("run/") and "/." not in path:
            self.model.changed(tier, path[4:], data, None if thread.process.name == "nature" else thread)

    def _object_looked(self, tier: str, prefix: str) -> None:
        if prefix == "run/attempts/":
            self.model.looked(tier)

    # Under the product

    @contextlib.contextmanager
    def installed(self) -> Iterator[pytest.MonkeyPatch]:
        """From here on the product's modules live in this world."""
        Path.disk = self.disk
        Path.made.clear()
        self.disk.root.names["run"] = self.disk.root.durable["run"] = type(self.disk.root)()
        with pytest.MonkeyPatch.context() as patched:
            for module, names in self.replaced().items():
                for name, value in names.items():
                    patched.setattr(module, name, value)
            yield patched

    @property
    def time(self) -> Any:
        """What product code takes for the module `time`."""
        clock = self.clock
        return SimpleNamespace(
            monotonic=lambda: clock.now,
            time=lambda: START + clock.now + clock.skew,
            time_ns=lambda: int((START + clock.now + clock.skew) * 1e9),
            sleep=clock.sleep,
        )

    def replaced(self) -> dict[Any, dict[str, Any]]:
        clock, os, time = self.clock, self.system, self.time
        threading = SimpleNamespace(
            Lock=lambda: Lock(clock),
            Event=lambda: Event(clock),
            current_thread=lambda: clock.current,
            main_thread=lambda: clock.current.process.threads[0],
        )
        tokens = SimpleNamespace(token_hex=lambda n: self.rng.randbytes(n).hex())
        no_secrets = checkpointing.redaction.redactor({})
        quiet = SimpleNamespace(SIGTERM=signal.SIGTERM, SIGINT=signal.SIGINT, SIG_IGN=None, signal=lambda *_: None)
        pool = {"ThreadPoolExecutor": lambda workers, **_: Executor(clock, workers)}
        return {
            checkpointing.phases: {"_listener": lambda: self.reached, "_watchers": []},
            checkpointing.commit: {"secrets": tokens, "time": time, "unseal": _known["unseal"]},
            checkpointing.disk: {"os": os},
            checkpointing.journal: {"os": os, "time": time, "threading": threading},
            checkpointing.manifest: {"decode": _known["decode"]},
            checkpointing.redaction: {"redactor": lambda: no_secrets},
            checkpointing.progress: {"os": os, "time": time, "threading": threading},
            checkpointing.stores.posix: {"os": os, "time": time, "secrets": tokens, "Path": Path},
            checkpointing.stores.s3: {
                "time": time,
                "threading": threading,
                "obstore": Obstore,
                "Retrying": _Retrying,
            },
            checkpointing.stores.s3.S3Store: {"_connect": connect(self.buckets, self.after)},
            checkpointing.replicator: {
                "POLL_SECONDS": 4.0,
                "os": os,
                "time": time,
                "threading": threading,
                "signal": quiet,
                **pool,
            }
            | {"wait": self._wait},
            checkpointing.verification: pool,
            tenacity.nap: {"time": time},
            tenacity.wait: {"random": self.rng},
        }

    def _wait(self, futures: Iterable[Future], timeout: float, *_: Any) -> tuple[list[Future], list[Future]]:
        """As `concurrent.futures.wait`, in an order that does not depend on where things lie in memory."""
        ordered = sorted(futures, key=lambda one: one.number)
        self.clock.wait(lambda: any(one.done() for one in ordered), timeout)
        return [one for one in ordered if one.done()], [one for one in ordered if not one.done()]
