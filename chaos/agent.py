"""The part of a drill that lives inside the run: it hears the phases and fires the planned faults at theirs.

HARNESS_PHASE_LISTENER=chaos.agent:listen   makes `checkpointing.phases.reached` call it
HARNESS_FAULT_PLAN=<plan.json>              the plan; its directory is where faults leave word (see `chaos.directory`)

A process says who it is by `driver.started` or `worker.started`; before that nothing fires in it. Phases that carry no
step happen in the step that this thread named last, 0 before any.
"""

import itertools
import logging
import os
import subprocess
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

from chaos import faults, lasting
from chaos.directory import Fired, Outcome, PlanDirectory
from chaos.plan import FaultPlan, PlannedFault
from chaos.process import ProcessId, loader_workers, wait_for
from chaos.scene import Scene
from chaos.witness import scene_of
from checkpointing.errors import ConfigError

PLAN_VARIABLE = "HARNESS_FAULT_PLAN"

_EFFECT_SECONDS = 5.0
"""How long the injector looks for the effect on another process. SIGKILL takes milliseconds."""

_START_SECONDS = 60.0
"""How long the process that holds a lasting fault may take to inject it."""

_log = logging.getLogger(__name__)


def listen(name: str, where: dict[str, Any]) -> None:
    """Raises ConfigError where the plan is missing or wrong."""
    _agent().hear(name, where)


@cache
def _agent() -> "Agent":
    path = os.environ.get(PLAN_VARIABLE)
    if not path:
        raise ConfigError(f"chaos.agent listens but {PLAN_VARIABLE} is not set: name the fault plan's JSON file")
    return Agent(Path(path))


class Agent:
    def __init__(self, path: Path) -> None:
        self._plan = FaultPlan.load(path)
        self._directory = PlanDirectory(path.parent)
        # next() on a counter is atomic, so phases may be reached from several threads.
        self._times_reached = [itertools.count(1) for _ in self._plan.faults]
        self._names: dict[int, str] = {}  # by pid: a forked child inherits this object but is not its parent
        self._here = threading.local()  # a save commits in a thread of its own, for a step of its own
        self._holders: list[subprocess.Popen[bytes]] = []

    def hear(self, phase: str, where: dict[str, Any]) -> None:
        if where.get("step") is not None:
            self._here.step = where["step"]
        step = getattr(self._here, "step", 0)
        if phase in ("driver.started", "worker.started"):
            self._introduce(where)
        me = self._names.get(os.getpid())
        for index, planned in enumerate(self._plan.faults):
            here = planned.at == phase and planned.trigger == me and planned.step in (None, step)
            if here and next(self._times_reached[index]) == planned.nth:
                self._fire(index, planned, step, where.get("owner"))

    def _introduce(self, where: dict[str, Any]) -> None:
        name = "driver" if where["role"] == "driver" else f"{where['role']}:{where['rank']}"
        pid = where.get("pid", os.getpid())
        self._names[pid] = name
        self._directory.announce(name, ProcessId.of(pid))

    def _fire(self, index: int, planned: PlannedFault, step: int, owner: Any) -> None:
        process = self._find(planned.target)
        needed = not planned.target.startswith("store:")
        if needed and (process is None or process.what_became_of_it()):
            _log.warning("fault %d (%s) did not fire: no process %s is running", index, planned.fault, planned.target)
            return
        fired = Fired(
            index=index,
            fault=planned.fault,
            target=planned.target,
            phase=planned.at,
            step=step,
            process=process,
            injector=ProcessId.current(),
            time=time.time(),
            seconds=planned.seconds,
            parameters=planned.parameters,
            site=self._plan.site,
        )
        if not self._directory.claim(fired):
            return
        fault = faults.load(fired.fault)
        if faults.lasts(fault) or planned.target == "supervisor":  # with which this process may die
            holder = lasting.start(self._directory, index)
            self._holders.append(holder)
            wait_for(lambda: self._directory.is_marked("injected", index) or holder.poll() is not None, _START_SECONDS)
        else:
            self._inject(fault, scene_of(self._directory, fired, owner))

    def _find(self, target: str) -> ProcessId | None:
        role, _, number = target.partition(":")
        if role != "loader":
            return self._directory.find(target)
        driver = self._directory.find("driver")
        workers = loader_workers(driver) if driver else []
        return workers[int(number)] if int(number) < len(workers) else None

    def _inject(self, fault: faults.Fault, scene: Scene) -> None:
        """Does not come back where the fault is this process's own death."""
        evidence = None
        try:
            fault.inject(scene)
            evidence = wait_for(lambda: fault.witness(scene), _EFFECT_SECONDS)
        finally:
            self._directory.write_outcome(scene.fired.index, Outcome(evidence=evidence))
