"""Did the faults really happen? Asked from outside, by the supervisor, after an attempt has ended."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from chaos import faults
from chaos.directory import Fired, PlanDirectory
from chaos.scene import Scene
from checkpointing.events import FaultWitnessed


def witness_fired(plan_directory: Path, already: Collection[int] = ()) -> list[FaultWitnessed]:
    """The faults that fired and whose effect is seen, for the journal, without those whose index is in `already`.

    That a process is gone proves little once its attempt has ended: they all are. So the injector's own word comes
    first, and where it left none it must have been the victim itself, dead at the instruction it chose. Of a fault that
    lasts only what was seen while it lasted counts.
    """
    directory = PlanDirectory(plan_directory)
    events = []
    for fired in directory.fired():
        if fired.index not in already and (evidence := _evidence(directory, fired)):
            events.append(
                FaultWitnessed(
                    index=fired.index,
                    fault=fired.fault,
                    target=fired.target,
                    phase=fired.phase,
                    step=fired.step,
                    pid=fired.process.pid if fired.process else None,
                    evidence=evidence,
                )
            )
    return events


def scene_of(directory: PlanDirectory, fired: Fired, owner: Any = None) -> Scene:
    parameters = faults.find(fired.fault).Parameters.model_validate(fired.parameters)
    return Scene(fired, parameters, directory.notes, owner)


def _evidence(directory: PlanDirectory, fired: Fired) -> str | None:
    outcome, fault = directory.outcome(fired.index), faults.load(fired.fault)
    if outcome is not None:
        return outcome.evidence
    if faults.lasts(fault) or fired.process != fired.injector:
        return None
    return fault.witness(scene_of(directory, fired))
