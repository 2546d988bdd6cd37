"""Every fault does what it says, its witness sees it, and its witness is silent where the effect was prevented."""

import http.client
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from chaos import damage, faults, inside, lasting, mounts, nodes, rules, signals
from chaos.directory import PlanDirectory, Site
from chaos.process import ProcessId, loader_workers
from chaos.scene import Scene
from chaos.witness import witness_fired
from checkpointing.blobs import get_blob
from checkpointing.errors import ConfigError, CorruptBlob, KeyMissing
from checkpointing.events import RunFinished
from checkpointing.history import newest_restorable, ranked_commits
from checkpointing.journal import Journal
from checkpointing.store import open_store

from .fault_samples import behind_a_proxy, held, running, scene, store_with_commit, until

SLEEPS = "import time; print('ready', flush=True); time.sleep(600)"
HANDLES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("ready", flush=True)
time.sleep(600)
"""
IGNORES = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""
GROWS = """
import time
print("ready", flush=True)
kept = []
while True:
    kept.append(bytearray(1 << 24))
    time.sleep(0.05)
    if len(kept) > 200:
        time.sleep(600)
"""
NODE = """
import os, subprocess, sys, time
workers = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)]
print("ready", flush=True)
time.sleep(600)
"""


def test_every_fault_is_whole_and_says_what_it_does() -> None:
    listed = faults.catalogue()
    assert len(listed) >= 30
    for name, kind, what, _ in listed:
        fault = faults.find(name)
        assert what.endswith(".") and kind in ("process", "rank", "node", "engine", "store", "remote"), name
        assert all(callable(getattr(fault, verb)) for verb in ("available", "inject", "heal", "witness")), name
        fault.Parameters()


def test_what_only_a_real_cluster_can_do_is_listed_with_the_reason(tmp_path: Path) -> None:
    unavailable = {listed.name: listed.unavailable for listed in faults.catalogue() if listed.unavailable}
    assert "Kubernetes" in (unavailable["delete_pod"] or "")
    assert "Kubernetes" in (unavailable["drain_node"] or "")
    assert "libfaketime" in (unavailable["clock_jump"] or "")
    with pytest.raises(ConfigError):
        faults.find("clock_jump").inject(scene(tmp_path, "clock_jump", "driver"))


@pytest.fixture
def sleeper() -> Iterator[ProcessId]:
    with running(SLEEPS) as process:
        yield process


def of(folder: Path, fault: str, process: ProcessId, **rest: Any) -> tuple[faults.Fault, Scene]:
    return faults.load(fault), scene(folder, fault, "policy:1", process, **rest)


def test_kill(tmp_path: Path, sleeper: ProcessId) -> None:
    fault, at = of(tmp_path, "kill", sleeper)
    assert fault.witness(at) is None
    fault.inject(at)
    assert until(lambda: fault.witness(at))


def test_stop_and_go_on(tmp_path: Path, sleeper: ProcessId) -> None:
    fault, at = of(tmp_path, "stop", sleeper)
    assert fault.witness(at) is None
    fault.inject(at)
    assert until(lambda: fault.witness(at)) == f"pid {sleeper.pid} is stopped"
    fault.heal(at)
    assert until(lambda: not sleeper.is_stopped())
    assert fault.witness(at) is None


def test_what_wakes_up_before_it_was_seen_is_not_witnessed(
    tmp_path: Path, sleeper: ProcessId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessId, "send", lambda self, signal: None)
    directory = PlanDirectory(tmp_path)
    at = scene(tmp_path, "stop", "policy:1", sleeper, seconds=0.3)
    lasting.hold(directory, at.fired)
    assert directory.is_marked("injected", 0) and directory.is_marked("healed", 0)
    assert witness_fired(tmp_path) == []


def test_a_lasting_fault_is_held_by_a_process_of_its_own(tmp_path: Path, sleeper: ProcessId) -> None:
    directory = PlanDirectory(tmp_path)
    scene(tmp_path, "stop", "policy:1", sleeper, seconds=0.3)
    with held(directory) as holder:
        assert until(lambda: directory.is_marked("injected", 0))
        assert until(lambda: directory.is_marked("healed", 0))
        assert holder.wait(20) == 0
    (event,) = witness_fired(tmp_path)
    assert event.evidence == f"pid {sleeper.pid} is stopped"
    assert until(lambda: not sleeper.is_stopped())


@pytest.mark.parametrize("who", ["driver", "target"])
def test_a_lasting_fault_ends_with_the_driver_and_with_its_target(tmp_path: Path, sleeper: ProcessId, who: str) -> None:
    directory = PlanDirectory(tmp_path)
    with running(SLEEPS) as driver:
        directory.announce("driver", driver)
        scene(tmp_path, "stop", "engine:0", sleeper)
        with held(directory) as holder:
            assert until(sleeper.is_stopped)
            os.kill((driver if who == "driver" else sleeper).pid, signal.SIGKILL)
            assert holder.wait(20) == 0
    assert until(lambda: not sleeper.is_stopped())


def test_of_what_lasts_only_its_holder_speaks(tmp_path: Path, sleeper: ProcessId) -> None:
    """Else a process that fired it and is then stopped by something else would be the witness."""
    at = scene(tmp_path / "by_another", "stop", "policy:1", sleeper)
    PlanDirectory(tmp_path).claim(at.fired.model_copy(update={"injector": sleeper}))
    os.kill(sleeper.pid, signal.SIGSTOP)
    assert until(sleeper.is_stopped)
    assert witness_fired(tmp_path) == []


def test_the_supervisor_can_end_what_lasts(tmp_path: Path, sleeper: ProcessId) -> None:
    directory = PlanDirectory(tmp_path)
    scene(tmp_path, "stop", "engine:0", sleeper)
    with held(directory) as holder:
        assert until(sleeper.is_stopped)
        lasting.end_all(tmp_path)
        assert holder.wait(20) == 0
    assert not sleeper.is_stopped()
    assert len(witness_fired(tmp_path)) == 1
    scene(tmp_path / "limited", "stop", "engine:0", sleeper, seconds=600)
    lasting.end_all(tmp_path / "limited", limited_too=False)
    assert not PlanDirectory(tmp_path / "limited").is_marked("healed", 0)


def test_a_lasting_fault_that_can_t_be_injected_is_not_witnessed(
    tmp_path: Path, sleeper: ProcessId, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: ProcessId, signal: int) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(ProcessId, "send", refuse)
    at = scene(tmp_path, "stop", "policy:1", sleeper, seconds=1)
    with pytest.raises(PermissionError):
        lasting.hold(PlanDirectory(tmp_path), at.fired)
    assert witness_fired(tmp_path) == []


@pytest.mark.parametrize("code", [SLEEPS, HANDLES])
def test_terminate(tmp_path: Path, code: str) -> None:
    with running(code) as process:
        fault, at = of(tmp_path, "terminate", process)
        assert fault.witness(at) is None
        fault.inject(at)
        assert "s after SIGTERM" in (until(lambda: fault.witness(at)) or "")


def test_sigterm_is_not_seen_where_it_is_ignored(tmp_path: Path) -> None:
    with running(IGNORES) as process:
        fault, at = of(tmp_path, "terminate", process)
        fault.inject(at)
        os.kill(process.pid, signal.SIGKILL)  # as everything is at the end of an attempt
        assert until(process.what_became_of_it)
        assert fault.witness(at) is None


def test_sigterm_that_was_not_sent_is_not_seen(
    tmp_path: Path, sleeper: ProcessId, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, at = of(tmp_path, "terminate", sleeper)
    with monkeypatch.context() as patched:
        patched.setattr(ProcessId, "send", lambda self, signal: None)
        fault.inject(at)
    assert fault.witness(at) is None
    monkeypatch.setattr(signals, "_PROMPT_SECONDS", 0.0)
    os.kill(sleeper.pid, signal.SIGKILL)  # much later, as far as the witness can tell
    assert until(sleeper.what_became_of_it)
    assert fault.witness(at) is None


def test_what_ends_with_its_run_was_not_ended_by_sigterm(tmp_path: Path, sleeper: ProcessId) -> None:
    fault, at = of(tmp_path, "terminate", sleeper, site=Site(run_dir=tmp_path / "run"))
    fault.inject(at)
    assert until(lambda: fault.witness(at))
    Journal(tmp_path / "run", "driver", 1).append(RunFinished(planned_steps=1, last_step=1))
    assert fault.witness(at) is None


def test_terminate_group(tmp_path: Path) -> None:
    with running(NODE) as leader, running(SLEEPS) as stranger:
        fault, at = of(tmp_path, "terminate_group", leader)
        fault.inject(at)
        assert (until(lambda: fault.witness(at)) or "").startswith("of 3 told: ")
        assert stranger.what_became_of_it() is None


def test_terminate_group_that_nobody_heard(tmp_path: Path, sleeper: ProcessId, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessId, "send", lambda self, signal: None)
    fault, at = of(tmp_path, "terminate_group", sleeper)
    fault.inject(at)
    assert fault.witness(at) is None


needs_groups = pytest.mark.skipif(
    bool(faults.find("memory_limit").available()), reason=str(faults.find("memory_limit").available())
)


@needs_groups
def test_memory_limit(tmp_path: Path) -> None:
    """A process that reuses what it has never met a limit on its address space, and its drill proved nothing."""
    with running(GROWS) as process:
        fault, at = of(tmp_path, "memory_limit", process)
        fault.inject(at)
        assert "killed by the kernel" in (until(lambda: fault.witness(at)) or "")
        fault.heal(at)
        assert not Path(at.noted()["group"]).exists()


@needs_groups
def test_memory_limit_that_nobody_meets_or_nobody_set(tmp_path: Path, sleeper: ProcessId) -> None:
    fault, at = of(tmp_path / "met", "memory_limit", sleeper)
    before = Path(f"/proc/{sleeper.pid}/cgroup").read_text()
    fault.inject(at)
    assert Path(f"/proc/{sleeper.pid}/cgroup").read_text() != before and fault.witness(at) is None
    fault.heal(at)
    assert Path(f"/proc/{sleeper.pid}/cgroup").read_text() == before
    at = scene(tmp_path / "set", "memory_limit", "policy:1", sleeper)
    os.kill(sleeper.pid, signal.SIGKILL)
    assert until(sleeper.what_became_of_it) and fault.witness(at) is None, "dead, but not of this"


def test_straggle(tmp_path: Path, sleeper: ProcessId) -> None:
    fault, at = of(tmp_path, "straggle", sleeper, parameters={"share": 0.5, "period": 0.1})
    fault.inject(at)
    assert "3 times" in (until(lambda: fault.witness(at)) or "")
    fault.heal(at)
    assert until(lambda: not sleeper.is_stopped())
    turns = ProcessId.model_validate(at.noted()["turns"])
    assert until(turns.what_became_of_it)
    os.waitpid(turns.pid, 0)
    assert not sleeper.is_stopped()


def test_one_that_hangs_is_no_straggler(tmp_path: Path, sleeper: ProcessId) -> None:
    fault, at = of(tmp_path, "straggle", sleeper)
    os.kill(sleeper.pid, signal.SIGSTOP)
    assert until(sleeper.is_stopped)
    assert all(fault.witness(at) is None for _ in range(5))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[ProcessId, list[ProcessId], ProcessId]]:
    """(a raylet, its workers, the head); each is a Python process that goes by that name."""
    with ExitStack() as stack:
        started = []
        for name in ("raylet", "gcs_server"):
            (tmp_path / name).symlink_to(sys.executable)
            session = f"--log_dir={tmp_path}/session_1/logs"
            started.append(stack.enter_context(running(NODE, session, program=tmp_path / name)))
        raylet, head = started
        workers = [ProcessId.of(child.pid) for child in psutil.Process(raylet.pid).children()]
        yield raylet, workers, head


def test_kill_node(tmp_path: Path, cluster: tuple[ProcessId, list[ProcessId], ProcessId]) -> None:
    raylet, workers, head = cluster
    fault, at = of(tmp_path, "kill_node", workers[0])
    assert fault.witness(at) is None
    fault.inject(at)
    assert (until(lambda: fault.witness(at)) or "").endswith("and 2 processes of its node")
    assert raylet.what_became_of_it() and not head.what_became_of_it()


def test_kill_head(tmp_path: Path, cluster: tuple[ProcessId, list[ProcessId], ProcessId]) -> None:
    raylet, workers, head = cluster
    fault, at = of(tmp_path, "kill_head", workers[0])
    fault.inject(at)
    assert (until(lambda: fault.witness(at)) or "").startswith("gcs_server: ")
    assert head.what_became_of_it() and not raylet.what_became_of_it()


@pytest.mark.parametrize("name", ["kill_node", "kill_head"])
def test_a_node_that_lives_on_is_not_lost(
    tmp_path: Path,
    cluster: tuple[ProcessId, list[ProcessId], ProcessId],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setattr(nodes, "_GONE_SECONDS", 0.0)
    monkeypatch.setattr(ProcessId, "send", lambda self, signal: None)
    fault, at = of(tmp_path, name, cluster[1][0])
    fault.inject(at)
    assert fault.witness(at) is None


def test_a_node_is_lost_when_nothing_of_it_is_left(
    tmp_path: Path, cluster: tuple[ProcessId, list[ProcessId], ProcessId], monkeypatch: pytest.MonkeyPatch
) -> None:
    raylet, workers, _ = cluster
    monkeypatch.setattr(nodes, "_GONE_SECONDS", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(ProcessId, "send", lambda self, signal: os.kill(raylet.pid, 9) if self == raylet else None)
        fault, at = of(tmp_path, "kill_node", workers[0])
        fault.inject(at)
    assert until(raylet.what_became_of_it) and fault.witness(at) is None
    for worker in workers:
        worker.send(signal.SIGKILL)
    assert until(lambda: fault.witness(at))


def test_a_process_on_no_node(tmp_path: Path, sleeper: ProcessId) -> None:
    fault, at = of(tmp_path, "kill_node", sleeper)
    with pytest.raises(ConfigError, match="on no Ray node"):
        fault.inject(at)


LOADER = """
import time
from tests.unit.test_data import Ids
from trainer.data import EpochLoader
next(iter(EpochLoader(Ids(8), 2, 1, 0, num_workers=2)))
print("ready", flush=True)
time.sleep(600)
"""


def test_the_loader_s_workers_are_found() -> None:
    with running(LOADER) as driver:
        workers = loader_workers(driver)
        assert len(workers) == 2 and {psutil.Process(w.pid).ppid() for w in workers} == {driver.pid}


DAMAGE = {"flip_blob": "have digest", "truncate_blob": "48 of 96 bytes are left", "delete_blob": "is gone"}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_blob_is_damaged(tmp_path: Path, name: str) -> None:
    site = store_with_commit(tmp_path / "store")
    at = scene(tmp_path, name, "store:file", site=site, parameters={"entry": "policy/rng"})
    fault, store = faults.load(name), open_store(at.store)
    ((_, manifest),) = [found for found in [newest_restorable(store)[0]] if found]
    assert fault.witness(at) is None
    fault.inject(at)
    assert DAMAGE[name] in (fault.witness(at) or "")
    with pytest.raises(CorruptBlob):
        get_blob(store, next(manifest.blobs()))


@pytest.mark.parametrize("name", [*DAMAGE, "torn_write"])
def test_a_blob_that_is_whole_is_not_damaged(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damage, "write", lambda *_: None)
    monkeypatch.setattr(damage, "delete", lambda *_: None)
    told = {} if name == "torn_write" else {"entry": "policy/rng"}
    at = scene(tmp_path, name, "store:file", site=store_with_commit(tmp_path / "store"), parameters=told)
    faults.load(name).inject(at)
    assert at.noted() and faults.load(name).witness(at) is None


def test_a_store_that_can_t_be_asked_is_no_proof(tmp_path: Path) -> None:
    at = scene(tmp_path, "delete_blob", "store:s3", site=Site(stores={"store:file": "file:///nowhere"}))
    with pytest.raises(ConfigError, match="can't break store:s3: the run has no such tier"):
        faults.load("delete_blob").inject(at)


def test_there_must_be_something_to_damage(tmp_path: Path) -> None:
    at = scene(tmp_path, "flip_blob", "store:file", site=Site(stores={"store:file": f"file://{tmp_path / 'none'}"}))
    with pytest.raises(ConfigError, match="no commit yet"):
        faults.load("flip_blob").inject(at)
    at = scene(tmp_path, "flip_blob", "store:file", site=store_with_commit(tmp_path / "store"))
    with pytest.raises(ConfigError, match="no entry 'policy/parameters'; there are: policy/rng"):
        faults.load("flip_blob").inject(at)


@pytest.mark.parametrize("file", ["commit", "manifest"])
def test_a_record_is_torn(tmp_path: Path, file: str) -> None:
    site = store_with_commit(tmp_path / "store")
    at, fault = scene(tmp_path, "torn_write", "store:file", site=site, parameters={"file": file}), "torn_write"
    faults.load(fault).inject(at)
    assert "bytes is zero" in (faults.load(fault).witness(at) or "")
    assert at.noted()["key"].startswith(f"{file}s/")
    if file == "commit":
        (rejected,) = ranked_commits(open_store(at.store))
        assert hasattr(rejected, "reason")


needs_mounts = pytest.mark.skipif(mounts.why_not() is not None, reason=str(mounts.why_not()))


@needs_mounts
def test_read_only(tmp_path: Path) -> None:
    fault, at = faults.load("read_only"), scene(tmp_path, "read_only", "store:file", site=store_at(tmp_path))
    assert fault.witness(at) is None
    fault.inject(at)
    try:
        assert "Read-only file system" in (fault.witness(at) or "")
    finally:
        fault.heal(at)
    fault.heal(at)
    assert fault.witness(at) is None


def test_a_store_that_is_not_there_is_not_read_only(tmp_path: Path) -> None:
    site = Site(stores={"store:file": f"file://{tmp_path / 'none'}"})
    assert faults.find("read_only").witness(scene(tmp_path, "read_only", "store:file", site=site)) is None


@needs_mounts
def test_store_gone(tmp_path: Path) -> None:
    fault, at = faults.load("store_gone"), scene(tmp_path, "store_gone", "store:file", site=store_at(tmp_path))
    assert fault.witness(at) is None
    fault.inject(at)
    try:
        assert "that were in it are gone" in (fault.witness(at) or "")
        with pytest.raises(KeyMissing):
            open_store(at.store).get("attempts/000001.json")
    finally:
        fault.heal(at)
    fault.heal(at)
    assert fault.witness(at) is None and open_store(at.store).get("attempts/000001.json")


@needs_mounts
@pytest.mark.parametrize("name", ["read_only", "store_gone"])
def test_a_mount_that_was_not_made_is_not_seen(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "mount", lambda *_: None)
    at = scene(tmp_path, name, "store:file", site=store_at(tmp_path))
    faults.load(name).inject(at)
    assert faults.load(name).witness(at) is None


def store_at(folder: Path) -> Site:
    return store_with_commit(folder / "store")


def ask(url: str, method: str = "GET") -> tuple[int, bytes]:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
        return answer.status, answer.read()


BROKEN: dict[str, tuple[dict[str, Any], str, type[Exception]]] = {
    "engine_unreachable": ({}, "engine:0", ConnectionResetError),
    "engine_error": ({}, "engine:0", urllib.error.HTTPError),
    "s3_down": ({}, "store:s3", ConnectionResetError),
    "s3_slow_down": ({}, "store:s3", urllib.error.HTTPError),
    "s3_expired": ({}, "store:s3", urllib.error.HTTPError),
}


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, list[str]]]:
    folder = tmp_path_factory.mktemp("proxy") / "proxy"
    with behind_a_proxy(folder) as (url, heard):
        yield folder, url, heard


Proxied = tuple[Path, str, list[str]]


def remote(folder: Path, proxied: Proxied, name: str, target: str, **told: Any) -> tuple[faults.Fault, Scene]:
    (proxied[0] / "applied" / "0").unlink(missing_ok=True)
    at = scene(folder, name, target, site=Site(proxies={target: str(proxied[0])}), parameters=told)
    return faults.load(name), at


@pytest.mark.parametrize("name", BROKEN)
def test_what_travels_is_broken(tmp_path: Path, proxied: Proxied, name: str) -> None:
    told, target, error = BROKEN[name]
    fault, at = remote(tmp_path, proxied, name, target, **told)
    assert ask(proxied[1]) == (200, b"x" * 100)
    assert fault.witness(at) is None
    fault.inject(at)
    assert fault.witness(at) is None, "nothing has met it yet"
    with pytest.raises(error) as caught:
        ask(proxied[1])
    if isinstance(caught.value, urllib.error.HTTPError):
        caught.value.close()
    assert fault.witness(at) == "the proxy did so to GET /"
    fault.heal(at)
    fault.heal(at)
    assert ask(proxied[1]) == (200, b"x" * 100)


@pytest.mark.parametrize(("name", "target"), [("engine_slow", "engine:0"), ("s3_slow", "store:s3")])
def test_what_travels_is_late(tmp_path: Path, proxied: Proxied, name: str, target: str) -> None:
    fault, at = remote(tmp_path, proxied, name, target, delay=600)
    fault.inject(at)
    late = http.client.HTTPConnection(proxied[1].removeprefix("http://"), timeout=0.3)
    late.request("GET", "/late")
    with pytest.raises(TimeoutError):
        late.getresponse()
    late.close()
    assert fault.witness(at) == "the proxy did so to GET /late"
    fault.heal(at)
    assert "/late" not in proxied[2]


def test_half_a_body(tmp_path: Path, proxied: Proxied) -> None:
    fault, at = remote(tmp_path, proxied, "engine_error", "engine:0", answer="half", at=10)
    fault.inject(at)
    assert ask(proxied[1])[0] == 200, "what is asked for by GET is left alone"
    with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
        ask(proxied[1], "POST")
    assert fault.witness(at)
    fault.heal(at)


def test_an_adapter_is_missed(tmp_path: Path, proxied: Proxied) -> None:
    fault, at = remote(tmp_path, proxied, "stale_adapter", "engine:0")
    fault.inject(at)
    load = f"{proxied[1]}/skyrl/v1/load_lora_adapter"
    assert ask(load, "POST") == (200, b"{}")
    assert "/skyrl/v1/load_lora_adapter" not in proxied[2]
    assert fault.witness(at)
    assert ask(load, "POST") == (200, b"x" * 100), "it misses one"
    fault.heal(at)


REMOTE = [*BROKEN, "engine_slow", "s3_slow", "stale_adapter"]


@pytest.mark.parametrize("name", REMOTE)
def test_a_proxy_that_was_not_told_breaks_nothing(
    tmp_path: Path, proxied: Proxied, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "impose", lambda *_, **__: None)
    fault, at = remote(tmp_path, proxied, name, "store:s3" if name.startswith("s3") else "engine:0")
    fault.inject(at)
    ask(f"{proxied[1]}/skyrl/v1/load_lora_adapter", "POST")
    assert fault.witness(at) is None


def test_without_a_proxy_nothing_can_be_broken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no proxy is in front of it"):
        faults.load("s3_down").inject(scene(tmp_path, "s3_down", "store:s3"))


def test_the_proxy_follows_what_is_behind_it(tmp_path: Path, proxied: Proxied) -> None:
    folder, url, heard = proxied
    before = (folder / "upstream").read_text()
    with behind_a_proxy(tmp_path / "other") as (_, heard_too):
        (folder / "upstream").write_text((tmp_path / "other" / "upstream").read_text())
        ask(f"{url}/moved")
        (folder / "upstream").write_text(before)
    assert heard_too == ["/moved"] and "/moved" not in heard


def rank() -> SimpleNamespace:
    """As an owner is: a wrapped model with gradients, and an optimizer that has made a step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.Adam([model.weight])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return SimpleNamespace(model=SimpleNamespace(model=model), optimizer=optimizer)


def test_a_gradient_is_not_finite(tmp_path: Path) -> None:
    owner = rank()
    at, fault = scene(tmp_path, "non_finite_gradient", "policy:1", owner=owner), "non_finite_gradient"
    assert faults.load(fault).witness(at) is None
    faults.load(fault).inject(at)
    assert int(owner.model.model.weight.grad.isnan().sum()) == 1
    assert "weight begins with NaN" in (faults.load(fault).witness(at) or "")


@pytest.mark.parametrize(("entry", "tensor"), [("parameters", "weight"), ("optimizer", "weight.exp_avg")])
def test_a_bit_of_the_state_is_wrong(tmp_path: Path, entry: str, tensor: str) -> None:
    owner = rank()
    at = scene(tmp_path, "alter_state", "policy:1", owner=owner, parameters={"entry": entry})
    before = owner.model.model.weight.clone(), owner.optimizer.state[owner.model.model.weight]["exp_avg"].clone()
    faults.load("alter_state").inject(at)
    after = owner.model.model.weight, owner.optimizer.state[owner.model.model.weight]["exp_avg"]
    changed = [int((a != b).sum()) for a, b in zip(before, after, strict=True)]
    assert changed == [entry == "parameters", entry != "parameters"]
    assert faults.load("alter_state").witness(at) == f"one bit of {tensor} has changed"


@pytest.mark.parametrize("name", ["non_finite_gradient", "alter_state"])
def test_what_was_not_altered_is_not_seen(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at = scene(tmp_path, name, "policy:1", owner=rank())
    with monkeypatch.context() as patched:
        patched.setattr(inside, "local", lambda tensor: tensor.detach().clone())
        faults.load(name).inject(at)
    assert at.noted() and faults.load(name).witness(at) is None


@pytest.mark.parametrize("name", ["non_finite_gradient", "alter_state"])
def test_the_supervisor_asks_while_the_rank_looks_and_gets_no_answer(tmp_path: Path, name: str) -> None:
    """Between its injection and its outcome; the rank is injector and target."""
    at = scene(tmp_path, name, "policy:1", ProcessId.current(), owner=rank())
    faults.load(name).inject(at)
    assert witness_fired(tmp_path) == []


@pytest.mark.parametrize("name", ["non_finite_gradient", "alter_state"])
@pytest.mark.parametrize("owner", [None, SimpleNamespace(model=torch.nn.Identity(), optimizer=None)])
def test_a_place_without_what_is_to_be_altered(tmp_path: Path, name: str, owner: Any) -> None:
    with pytest.raises(ConfigError, match=r"hands over no rank with a model|holds no"):
        faults.load(name).inject(scene(tmp_path, name, "policy:1", owner=owner))


def test_word_is_left_once_and_kept(tmp_path: Path) -> None:
    at = scene(tmp_path, "kill", "driver", ProcessId.current())
    at.note({"a": 1})
    at.note({"b": 2})
    assert at.noted() == json.loads((tmp_path / "notes" / "0.json").read_text()) == {"a": 1, "b": 2}
