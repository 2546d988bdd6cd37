"""The part of a drill that lives inside the run: it hears the phases and fires the planned faults at theirs.

HARNESS_PHASE_LISTENER=chaos.agent:listen   makes `checkpointing.phases.reached` call it
HARNESS_FAULT_PLAN=<plan.json>              the plan; its directory is where faults leave word (see `chaos.directory`)

A process says who it is by `driver.started` or `worker.started`; before that nothing fires in it. Phases that carry no
step happen in the step that this process named last, 0 before any.
"""

import itertools
import logging
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

from chaos import faults
from chaos.directory import Fired, Outcome, PlanDirectory
from chaos.plan import FaultPlan, PlannedFault
from chaos.process import ProcessId
from checkpointing.errors import ConfigError

PLAN_VARIABLE = "HARNESS_FAULT_PLAN"

_EFFECT_SECONDS = 5.0
"""How long the injector looks for the effect on another process. SIGKILL takes milliseconds."""

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
        self._step = 0

    def hear(self, phase: str, where: dict[str, Any]) -> None:
        if where.get("step") is not None:
            self._step = where["step"]
        if phase in ("driver.started", "worker.started"):
            self._introduce(where)
        me = self._names.get(os.getpid())
        for index, planned in enumerate(self._plan.faults):
            here = planned.at == phase and planned.trigger == me and planned.step in (None, self._step)
            if here and next(self._times_reached[index]) == planned.nth:
                self._fire(index, planned)

    def _introduce(self, where: dict[str, Any]) -> None:
        name = "driver" if where["role"] == "driver" else f"{where['role']}:{where['rank']}"
        pid = where.get("pid", os.getpid())
        self._names[pid] = name
        self._directory.announce(name, ProcessId.of(pid))

    def _fire(self, index: int, planned: PlannedFault) -> None:
        process = self._directory.find(planned.target)
        if process is None or process.what_became_of_it():
            _log.warning("fault %d (%s) did not fire: no process %s is running", index, planned.fault, planned.target)
            return
        fired = Fired(
            index=index,
            fault=planned.fault,
            target=planned.target,
            phase=planned.at,
            step=self._step,
            process=process,
            injector=ProcessId.current(),
        )
        if self._directory.claim(fired):
            self._inject(fired)

    def _inject(self, fired: Fired) -> None:
        """Does not come back where the fault is this process's own death."""
        fault = faults.load(fired.fault)
        evidence = None
        try:
            fault.inject(fired.process.pid)
            evidence = _wait_for_evidence(fault, fired)
        finally:
            self._directory.write_outcome(fired.index, Outcome(evidence=evidence))


def _wait_for_evidence(fault: faults.Fault, fired: Fired) -> str | None:
    deadline = time.monotonic() + _EFFECT_SECONDS
    while (evidence := fault.witness(fired)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return evidence
