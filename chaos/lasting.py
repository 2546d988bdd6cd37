"""A fault that lasts, held by a process of its own: it injects, looks for what the fault does, and heals.

The victim can't: it may be stopped, or cut off. This process leads a session of its own, so that it is not ended with
the attempt, and is gone when the fault is: after its `seconds`, or without them when the driver of that time has ended,
and always when the process that it breaks has ended.

A fault that the process which fires it would not survive, as a driver its supervisor, is injected from here as well.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from chaos import faults
from chaos.directory import Fired, Outcome, PlanDirectory
from chaos.scene import Scene
from chaos.witness import scene_of

_LOOK_SECONDS = 0.05
_EFFECT_SECONDS = 5.0
"""How long one that does not last is looked for: later, its target may be gone for another reason."""


def start(directory: PlanDirectory, index: int) -> subprocess.Popen[bytes]:
    """Returns at once; "injected" is marked when the fault is in place, or could not be put there."""
    log = directory.path / "notes" / f"{index}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    env = {name: value for name, value in os.environ.items() if name != "HARNESS_PHASE_LISTENER"}
    with log.open("ab") as sink:
        return subprocess.Popen(
            [sys.executable, "-m", "chaos.lasting", str(directory.path.resolve()), str(index)],
            env=env | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def hold(directory: PlanDirectory, fired: Fired) -> None:
    """Inject, look, heal. Raises what `inject` raises, after it has been undone as far as it was done."""
    fault, scene = faults.load(fired.fault), scene_of(directory, fired)
    driver = directory.find("driver")
    seconds = fired.seconds if faults.lasts(fault) else _EFFECT_SECONDS
    seen, began = False, time.monotonic()
    try:
        fault.inject(scene)
        directory.mark("injected", fired.index)
        while not directory.is_marked("healed", fired.index):
            seen = seen or _look(directory, fault, scene)
            over = seconds is not None and time.monotonic() - began >= seconds
            alone = seconds is None and driver is not None and driver.what_became_of_it()
            if over or alone or (fired.process and fired.process.what_became_of_it()):
                break
            time.sleep(_LOOK_SECONDS)
    finally:
        try:
            end(directory, fired)
        finally:
            directory.mark("injected", fired.index)


def end(directory: PlanDirectory, fired: Fired) -> None:
    """Heal a fault that lasts, whoever holds it, after a last look at what it does."""
    fault, scene = faults.load(fired.fault), scene_of(directory, fired)
    try:
        _look(directory, fault, scene)
    finally:
        directory.write_outcome(fired.index, Outcome(evidence=None))  # unless something was seen
        fault.heal(scene)
        directory.mark("healed", fired.index)


def end_all(plan_directory: Path, limited_too: bool = True) -> None:
    """Heal what still lasts: with `limited_too` also what was to last for so many seconds and is not over."""
    directory = PlanDirectory(plan_directory)
    for fired in directory.fired():
        ends = limited_too or fired.seconds is None
        if ends and faults.lasts(faults.load(fired.fault)) and not directory.is_marked("healed", fired.index):
            end(directory, fired)


def _look(directory: PlanDirectory, fault: faults.Fault, scene: Scene) -> bool:
    """Whether the fault has been seen; the first time is written down."""
    if directory.outcome(scene.fired.index):
        return True
    if evidence := fault.witness(scene):
        directory.write_outcome(scene.fired.index, Outcome(evidence=evidence))
    return bool(evidence)


def main() -> None:
    directory, index = PlanDirectory(Path(sys.argv[1])), int(sys.argv[2])
    hold(directory, next(fired for fired in directory.fired() if fired.index == index))


if __name__ == "__main__":
    main()
