"""A planned fault fires once, just where it was planned, and is witnessed only if it happened. Each SIGKILL is real."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from chaos import lasting
from chaos.directory import Fired, PlanDirectory
from chaos.plan import FaultPlan
from chaos.process import ProcessId
from chaos.witness import witness_fired
from checkpointing.errors import ConfigError
from checkpointing.phases import PHASES

ROOT = Path(__file__).parents[2]

DRIVER = """
from checkpointing.phases import reached
reached("driver.started", role="driver", attempt=1)
for step in range(1, 4):
    for request in range(1, 4):
        print(step, request, flush=True)
        reached("generate.request", step=step)
"""

RANK = """
import sys
from checkpointing.phases import reached
role, rank = sys.argv[1], int(sys.argv[2])
reached("worker.started", role=role, rank=rank)
for step in range(1, 4):
    reached("train.forward_backward", role=role, rank=rank, step=step)
    print(step, flush=True)
    reached("train.optimizer", role=role, rank=rank)
"""


def write_plan(directory: Path, *planned: dict[str, Any]) -> Path:
    path = directory / "plan.json"
    path.write_text(json.dumps({"faults": [{"fault": "kill", **fault} for fault in planned]}))
    return path


def run(plan: Path, code: str, *arguments: object) -> tuple[int, list[str]]:
    """Exit code (minus the signal) and the lines that the process got to print."""
    environment = os.environ | {
        "HARNESS_PHASE_LISTENER": "chaos.agent:listen",
        "HARNESS_FAULT_PLAN": str(plan),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    return done.returncode, done.stdout.splitlines()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def self_fired(process: ProcessId, index: int = 0) -> Fired:
    """As left behind by a process that was about to kill itself."""
    return Fired(
        index=index,
        fault="kill",
        target="policy:1",
        phase="train.optimizer",
        step=3,
        process=process,
        injector=process,
    )


def test_kills_at_the_planned_place_and_only_once(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, {"target": "driver", "at": "generate.request", "step": 2, "nth": 2})
    assert run(plan, DRIVER) == (-signal.SIGKILL, ["1 1", "1 2", "1 3", "2 1", "2 2"])
    code, lines = run(plan, DRIVER)
    assert (code, len(lines)) == (0, 9)


def test_without_a_step_the_nth_of_the_process_counts(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, {"target": "driver", "at": "generate.request", "nth": 4})
    assert run(plan, DRIVER)[1][-1] == "2 1"


def test_three_kills_in_a_row(tmp_path: Path) -> None:
    places = [{"target": "driver", "at": "generate.request", "step": step} for step in (3, 1, 2)]
    plan = write_plan(tmp_path, *places)
    assert [run(plan, DRIVER)[1][-1] for _ in range(4)] == ["1 1", "2 1", "3 1", "3 3"]
    assert [event.index for event in witness_fired(tmp_path)] == [0, 1, 2]
    assert [event.index for event in witness_fired(tmp_path, already={0, 2})] == [1]


@pytest.mark.parametrize(
    ("role", "rank", "code"), [("policy", 1, -signal.SIGKILL), ("policy", 0, 0), ("critic", 1, 0), ("policy", 11, 0)]
)
def test_only_the_rank_aimed_at_dies(tmp_path: Path, role: str, rank: int, code: int) -> None:
    """`train.optimizer` names no step: it happens in the one that forward/backward named."""
    plan = write_plan(tmp_path, {"target": "policy:1", "at": "train.optimizer", "step": 2})
    assert run(plan, RANK, role, rank) == (code, ["1", "2"] if code else ["1", "2", "3"])


def test_fired_says_what_happened_where(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, {"target": "policy:1", "at": "train.optimizer", "step": 2})
    run(plan, RANK, "policy", 1)
    (event,) = witness_fired(tmp_path)
    assert (event.index, event.fault, event.target, event.phase, event.step) == (
        0,
        "kill",
        "policy:1",
        "train.optimizer",
        2,
    )
    assert event.evidence == f"pid {event.pid} has gone"


def test_driver_reaches_a_phase_and_another_process_dies(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    plan = write_plan(tmp_path, {"target": "policy:1", "at": "generate.request", "step": 2})
    announce = f"""
from checkpointing.phases import reached
reached("worker.started", role="policy", rank=1, pid={sleeper.pid})
"""
    code, lines = run(plan, announce + DRIVER)
    assert (code, len(lines)) == (0, 9)
    assert sleeper.wait(timeout=10) == -signal.SIGKILL
    (event,) = witness_fired(tmp_path)
    assert (event.pid, event.step) == (sleeper.pid, 2)


def test_a_rank_reaches_a_phase_and_the_driver_dies(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    fault = {"target": "driver", "at": "train.optimizer", "step": 2, "reached_by": "policy:1"}
    plan = write_plan(tmp_path, fault)
    PlanDirectory(tmp_path).announce("driver", ProcessId.of(sleeper.pid))
    assert run(plan, RANK, "policy", 0)[0] == 0
    assert sleeper.poll() is None
    assert run(plan, RANK, "policy", 1)[0] == 0
    assert sleeper.wait(timeout=10) == -signal.SIGKILL


def test_a_later_process_with_the_same_pid_is_left_alone(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    plan = write_plan(tmp_path, {"target": "policy:1", "at": "generate.request"})
    process = ProcessId.of(sleeper.pid)
    earlier = process.model_copy(update={"start_ticks": process.start_ticks - 1})
    PlanDirectory(tmp_path).announce("policy:1", earlier)
    assert run(plan, DRIVER)[0] == 0
    assert sleeper.poll() is None
    assert witness_fired(tmp_path) == []
    assert PlanDirectory(tmp_path).fired() == []  # so it can still fire in a later attempt


def test_unknown_target_does_not_fire(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, {"target": "policy:1", "at": "generate.request"})
    assert run(plan, DRIVER)[0] == 0
    assert witness_fired(tmp_path) == []


def test_a_forked_child_is_not_its_parent(tmp_path: Path) -> None:
    """Loader workers are forked from the driver and run its code."""
    plan = write_plan(tmp_path, {"target": "driver", "at": "store.put_written"})
    forked = """
import os
from checkpointing.phases import reached
reached("driver.started", role="driver", attempt=1)
if (child := os.fork()) == 0:
    reached("store.put_written")
    os._exit(0)
print(os.waitpid(child, 0)[1], flush=True)
reached("store.put_written")
"""
    assert run(plan, forked) == (-signal.SIGKILL, ["0"])


def test_a_fault_that_does_nothing_is_never_witnessed(tmp_path: Path) -> None:
    """Its target is gone when the attempt has ended, as all processes are: that must not count."""
    plan = write_plan(tmp_path, {"target": "driver", "at": "generate.request"})
    harmless = """
import chaos.agent, chaos.faults.kill
chaos.agent._EFFECT_SECONDS = 0
chaos.faults.kill.inject = lambda scene: None
"""
    assert run(plan, harmless + DRIVER)[0] == 0
    process = PlanDirectory(tmp_path).fired()[0].process
    assert process is not None and process.what_became_of_it()
    assert witness_fired(tmp_path) == []


def test_an_injection_that_fails_is_never_witnessed(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, {"target": "driver", "at": "generate.request"})
    refused = """
import chaos.faults.kill
def inject(scene):
    raise PermissionError("not yours")
chaos.faults.kill.inject = inject
"""
    assert run(plan, refused + DRIVER)[0] == 1
    assert witness_fired(tmp_path) == []


def test_an_injector_that_died_before_it_looked_is_no_evidence(tmp_path: Path) -> None:
    gone = ProcessId(pid=os.getpid(), start_ticks=0)
    PlanDirectory(tmp_path).claim(self_fired(gone).model_copy(update={"injector": ProcessId.current()}))
    assert witness_fired(tmp_path) == []


def test_witness_speaks_only_after_the_death(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    PlanDirectory(tmp_path).claim(self_fired(ProcessId.of(sleeper.pid)))
    assert witness_fired(tmp_path) == []
    sleeper.kill()
    sleeper.wait()
    assert [event.evidence for event in witness_fired(tmp_path)] == [f"pid {sleeper.pid} has gone"]


def test_witness_is_not_misled_by_a_reused_pid(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    process = ProcessId.of(sleeper.pid)
    PlanDirectory(tmp_path).claim(self_fired(process.model_copy(update={"start_ticks": process.start_ticks - 1})))
    (event,) = witness_fired(tmp_path)
    assert event.evidence == f"pid {sleeper.pid} now belongs to a later process"


def test_dead_but_not_reaped_is_dead_and_stopped_is_not(sleeper: subprocess.Popen[bytes]) -> None:
    process = ProcessId.of(sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    assert process.what_became_of_it() is None
    sleeper.kill()
    deadline = time.monotonic() + 10
    while process.what_became_of_it() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.what_became_of_it() == f"pid {sleeper.pid} is dead and not yet reaped"
    sleeper.wait()
    with pytest.raises(ProcessLookupError):
        ProcessId.of(sleeper.pid)


def test_a_fault_is_claimed_once_however_many_try(tmp_path: Path) -> None:
    fired = self_fired(ProcessId.current())
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda _: PlanDirectory(tmp_path).claim(fired), range(8)))
    assert sorted(claims) == [False] * 7 + [True]
    assert PlanDirectory(tmp_path).fired() == [fired]


def test_a_process_that_stops_itself_goes_on_where_it_was(tmp_path: Path) -> None:
    plan = write_plan(
        tmp_path, {"fault": "stop", "target": "driver", "at": "generate.request", "step": 2, "seconds": 0.2}
    )
    code, lines = run(plan, DRIVER)
    assert (code, len(lines)) == (0, 9)
    (event,) = witness_fired(tmp_path)
    assert event.evidence == f"pid {event.pid} is stopped" and event.step == 2


def test_a_fault_that_lasts_and_can_t_be_injected_holds_nobody_up(tmp_path: Path) -> None:
    """Its target is a store, and the plan does not say where that is."""
    fault = {"fault": "read_only", "target": "store:file", "at": "generate.request", "step": 1}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"faults": [fault]}))
    assert run(plan, "import chaos.faults.read_only as f\nf.available = lambda: None\n" + DRIVER)[0] == 0
    assert witness_fired(tmp_path) == []
    assert PlanDirectory(tmp_path).outcome(0) is not None, "it is known that nothing was seen"


def test_a_rank_is_altered_from_within(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, {"fault": "non_finite_gradient", "target": "policy:1", "at": "train.optimizer"})
    rank = """
from types import SimpleNamespace
import torch
from checkpointing.phases import reached
model = torch.nn.Linear(2, 1)
model(torch.ones(2)).sum().backward()
reached("worker.started", role="policy", rank=1)
reached("train.optimizer", role="policy", rank=1, step=2, owner=SimpleNamespace(model=model))
print(int(model.weight.grad.isnan().sum()))
"""
    assert run(plan, rank) == (0, ["1"])
    (event,) = witness_fired(tmp_path)
    assert event.evidence.startswith("the gradient of weight begins with NaN")


def test_a_loader_worker_is_a_process_that_the_driver_has_spawned(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, {"target": "loader:1", "at": "generate.begin"})
    spawned = """
import multiprocessing, time
from checkpointing.phases import reached
reached("driver.started", role="driver", attempt=1)
context = multiprocessing.get_context("spawn")
children = [context.Process(target=time.sleep, args=(600,)) for _ in range(2)]
for child in children:
    child.start()
reached("generate.begin", step=1)
children[1].join()
print(children[1].exitcode, flush=True)
children[0].terminate()
"""
    assert run(plan, spawned) == (0, ["-9"])
    assert len(witness_fired(tmp_path)) == 1


SUPERVISOR = """
import pathlib, subprocess, sys
from chaos.directory import PlanDirectory
from chaos.process import ProcessId
PlanDirectory(pathlib.Path(sys.argv[1])).announce("supervisor", ProcessId.current())
subprocess.run([sys.executable, "-c", sys.argv[2]])
"""
DIES_WITH_ITS_PARENT = "import ctypes; ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, as ours do"


def test_a_driver_that_dies_with_its_supervisor_leaves_a_witness(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, {"target": "supervisor", "at": "generate.request", "step": 2})
    assert run(plan, SUPERVISOR, tmp_path, DIES_WITH_ITS_PARENT + DRIVER)[0] == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while not (seen := witness_fired(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [event.target for event in seen] == ["supervisor"]


def test_a_supervisor_that_was_not_killed_and_ends_later_is_not_witnessed(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chaos.faults.kill.inject", lambda scene: None)
    monkeypatch.setattr(lasting, "_EFFECT_SECONDS", 0.1)
    fired = self_fired(ProcessId.of(sleeper.pid)).model_copy(update={"target": "supervisor"})
    directory = PlanDirectory(tmp_path)
    directory.claim(fired)
    lasting.hold(directory, fired)
    sleeper.kill()
    sleeper.wait()
    assert witness_fired(tmp_path) == []


GOOD = {"fault": "kill", "target": "policy:1", "at": "train.optimizer"}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (GOOD | {"at": "train.optimiser"}, r"faults\.0\.at: .*no phase 'train.optimiser'.*train\.optimizer"),
        (GOOD | {"fault": "murder"}, "no fault 'murder'; there are: alter_state, .*kill"),
        (GOOD | {"target": "policy"}, r"faults\.0\.target"),
        (GOOD | {"reached_by": "1"}, r"faults\.0\.reached_by"),
        (GOOD | {"nth": 0}, r"faults\.0\.nth"),
        (GOOD | {"step": "two"}, r"faults\.0\.step"),
        (GOOD | {"when": 3}, r"faults\.0\.when"),
        ({"fault": "kill"}, r"faults\.0\.target: .*; faults\.0\.at"),
    ],
)
def test_wrong_plan_is_refused(tmp_path: Path, fault: dict[str, object], message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"faults": [fault]}))
    with pytest.raises(ConfigError, match=message) as caught:
        FaultPlan.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", '{"faults": [', None])
def test_plan_that_is_no_plan_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        FaultPlan.load(path)


def test_listening_without_a_plan_is_refused(tmp_path: Path) -> None:
    plan = tmp_path / "absent.json"
    assert run(plan, DRIVER) == (1, [])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (GOOD | {"seconds": 3}, "'kill' is over once it is injected"),
        (GOOD | {"parameters": {"hard": True}}, "'kill': hard: Extra inputs"),
        (GOOD | {"fault": "straggle", "parameters": {"share": 2}}, "'straggle': share: Input should be less than 1"),
        (GOOD | {"target": "store:file"}, "breaks a target such as driver, not store:file"),
        (GOOD | {"fault": "flip_blob"}, "breaks a target such as store:file, not policy:1"),
        (GOOD | {"fault": "engine_slow"}, "breaks a target such as engine:0, not policy:1"),
        (GOOD | {"fault": "s3_down"}, "breaks a target such as store:s3, not policy:1"),
        (GOOD | {"fault": "s3_down", "target": "store:file"}, "a tier that is reached by HTTP, not store:file"),
        (GOOD | {"fault": "flip_blob", "target": "store:file"}, "say by which process it is `reached_by`"),
        (GOOD | {"fault": "alter_state", "at": "save.capture"}, "from within a rank: at train.optimizer"),
        (GOOD | {"fault": "alter_state", "reached_by": "policy:0"}, "reached by the target itself"),
        (GOOD | {"fault": "delete_pod"}, "can't be done here: needs a Kubernetes cluster"),
    ],
)
def test_a_fault_that_is_not_possible_so_is_refused(tmp_path: Path, fault: dict[str, object], message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"faults": [fault]}))
    with pytest.raises(ConfigError, match=message):
        FaultPlan.load(path)


def test_unavailable_fault_is_refused_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = write_plan(tmp_path, GOOD)
    monkeypatch.setattr("chaos.faults.kill.available", lambda: "no signals here")
    with pytest.raises(ConfigError, match=r"kill.*can't be done here: no signals here"):
        FaultPlan.load(plan)


def test_every_phase_that_the_code_reaches_is_listed() -> None:
    sources = [path for layer in ("checkpointing", "trainer", "harness") for path in (ROOT / layer).rglob("*.py")]
    called = {name for path in sources for name in re.findall(r'\breached\(\s*"([^"]+)"', path.read_text())}
    assert called  # the pattern still finds them
    assert called <= PHASES
