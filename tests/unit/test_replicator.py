"""The replicator: no outage reaches training, the backlog is bounded, and every way for the process to end is clean."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Buffer, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from checkpointing.commit import Commit, start_attempt
from checkpointing.errors import CorruptBlob, Fenced, StoreError
from checkpointing.events import CheckpointReplicated, CheckpointsCoalesced, CheckpointsPruned, Event, ReplicationFailed
from checkpointing.journal import Journal, read_journal
from checkpointing.phases import REPLICATION_PHASES
from checkpointing.replicator import Carrier, Voice
from checkpointing.retention import Keep
from checkpointing.settings import Checkpoints
from checkpointing.store import Item, Store, open_store
from checkpointing.tiers import Tier
from trainer.upkeep import Replicas

from .checkpoint_samples import (
    Crash,
    Mortal,
    Wrapper,
    assert_whole,
    blob_keys,
    flip,
    save,
    train,
)

pytestmark = pytest.mark.usefixtures("unsynced")


class Down(Wrapper):
    """Refuses some verbs while `down`."""

    def __init__(self, store: Store, verbs: str) -> None:
        super().__init__(store)
        self.down, self._verbs = True, verbs.split()

    def put(self, key: str, data: Buffer) -> None:
        self._ask("put")
        super().put(key, data)

    def create(self, key: str, data: Buffer) -> None:
        self._ask("create")
        super().create(key, data)

    def list(self, prefix: str) -> Sequence[Item]:
        self._ask("list")
        return super().list(prefix)

    def _ask(self, verb: str) -> None:
        if self.down and verb in self._verbs:
            raise StoreError(f"{verb}: 503 SlowDown")


class Script(threading.Event):
    """What happens meanwhile, whenever the carrier waits. When nothing is left to happen, the run has ended."""

    def __init__(self, *acts: Callable[[], object]) -> None:
        super().__init__()
        self._acts = list(acts)

    def wait(self, timeout: float | None = None) -> bool:
        if self._acts:
            self._acts.pop(0)()
        if not self._acts:
            self.set()
        return self.is_set()


class Training:
    """An attempt that commits a step each time it is called."""

    def __init__(self, store: Store) -> None:
        self.store, self.attempt, self.commits = store, start_attempt(store, None), list[Commit]()

    def __call__(self) -> None:
        before = self.commits[-1] if self.commits else None
        self.commits.append(save(self.store, self.attempt, len(self.commits) + 1, before))


def events(run_dir: Path, kind: type[Event]) -> list[Any]:
    return [record.event for record in read_journal(run_dir) if isinstance(record.event, kind)]


@pytest.fixture
def voice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Voice:
    monkeypatch.setattr("checkpointing.replicator.POLL_SECONDS", 0.0)
    return Voice(Journal(tmp_path, "replicator", 1))


@pytest.mark.parametrize("verbs", ["put", "create", "put create list"])
def test_an_outage_of_fifty_checkpoints(source: Store, target: Store, tmp_path: Path, voice: Voice, verbs: str) -> None:
    """Nothing fails; the backlog stays bounded; when the tier is back the newest are carried, and no others."""
    training, there = Training(source), Down(target, verbs)
    carrier = Carrier(source, Tier("s3", "", there), training.attempt, 4, voice, None)
    there.down = False
    training()
    heal = lambda: setattr(there, "down", False)  # noqa: E731
    carrier.run(Script(lambda: setattr(there, "down", True), *[training] * 50, heal))
    failed = events(tmp_path, ReplicationFailed)
    assert [(event.tier, event.newest_there) for event in failed] == [("s3", 1)]
    assert failed[0].newest_local >= 2 and "503 SlowDown" in failed[0].reason
    done = events(tmp_path, CheckpointReplicated)
    assert [event.step for event in done] == [1, 48, 49, 50, 51]
    assert done[-1].commit == training.commits[-1].key and done[-1].bytes_new > 0
    let_go = [key for event in events(tmp_path, CheckpointsCoalesced) for key in event.commits]
    assert let_go == [found.key for found in training.commits[1:47]]
    assert_whole(target, training.commits[0], *training.commits[47:])


def test_a_carrier_that_is_started_again_goes_on_where_the_one_before_it_stopped(
    source: Store, target: Store, tmp_path: Path, voice: Voice
) -> None:
    training = Training(source)
    for _ in range(6):
        training()
    dying = Mortal(target, 9, done=True)
    with pytest.raises(Crash):
        Carrier(source, Tier("s3", "", dying), training.attempt, 4, voice, None).carry()
    there = Mortal(target)
    Carrier(source, Tier("s3", "", there), training.attempt, 4, voice, None).carry()
    assert_whole(target, *training.commits[2:])
    assert len({key for verb, key in there.calls if verb == "put"} & {key for verb, key in dying.calls[:9]}) == 0


def test_a_second_outage_is_said_again(source: Store, target: Store, tmp_path: Path, voice: Voice) -> None:
    training, there = Training(source), Down(target, "put")
    carrier = Carrier(source, Tier("s3", "", there), training.attempt, 4, voice, None)
    for down in (True, True, False, True, False):
        there.down = down
        training()
        training()
        if down:
            carrier.run(Script(lambda: None, lambda: None, lambda: setattr(there, "down", False)))
        else:
            carrier.carry()
    assert len(events(tmp_path, ReplicationFailed)) == 3


def test_a_damaged_commit_does_not_hold_up_those_after_it(
    source: Store, target: Store, tmp_path: Path, voice: Voice
) -> None:
    attempt, (one, two) = train(source, None, 1, 2)
    flip(source, blob_keys(source, one)[0])
    Carrier(source, Tier("s3", "", target), attempt, 4, voice, None).carry()
    assert [item.key for item in target.list("commits/")] == [two.key]
    assert [blob_keys(source, one)[0] in event.reason for event in events(tmp_path, ReplicationFailed)] == [True]
    three = save(source, attempt, 3, two, payload="new")
    flip(source, blob_keys(source, three)[0])
    carrier = Carrier(source, Tier("s3", "", target), attempt, 4, voice, None)
    for _ in range(2):  # the newest is tried until it is whole, or there is a newer one
        with pytest.raises(CorruptBlob):
            carrier.carry()
    assert len(events(tmp_path, ReplicationFailed)) == 2


def test_what_is_committed_just_before_the_end_is_carried(source: Store, target: Store, voice: Voice) -> None:
    training, stop = Training(source), threading.Event()

    class Overtaken(Carrier):
        def carry(self) -> None:
            super().carry()
            if not stop.is_set():
                training()
                stop.set()

    Overtaken(source, Tier("s3", "", target), training.attempt, 4, voice, None).run(stop)
    assert_whole(target, *training.commits)


def test_what_the_journal_refuses_is_said_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Full(Journal):
        full = True

        def append(self, event: Event) -> None:
            if self.full:
                raise StoreError("no space")
            super().append(event)

    journal = Full(tmp_path, "replicator", 1)
    voice = Voice(journal)
    for key in ("a", "b"):
        voice.say(CheckpointsCoalesced(tier="s3", commits=[key]))
    with pytest.raises(StoreError, match="no space"):
        voice.finish()
    journal.full = False
    voice.finish()
    assert [event.commits for event in events(tmp_path, CheckpointsCoalesced)] == [["a"], ["b"]]
    assert "no space" in capsys.readouterr().err


KILL_ONCE = """
import os, pathlib, signal
def listen(name, where):
    if name == os.environ["KILL_AT"] and where.get("step") == 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""

PARENT = """
import json, os, subprocess, sys, time
job = json.loads(sys.argv[1]) | {"parent": os.getpid()}
child = subprocess.Popen([sys.executable, "-m", "checkpointing.replicator", json.dumps(job)])
print(child.pid, flush=True)
time.sleep(600)
"""


def job(tmp_path: Path, *targets: str, **more: Any) -> str:
    urls = [str(tmp_path / "source"), *(targets or [str(tmp_path / "target")])]
    body = {"run_dir": str(tmp_path), "urls": urls, "attempt": 1, "parent": os.getpid(), "backlog": 9}
    return json.dumps(body | more)


@contextmanager
def replicator(told: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "checkpointing.replicator", told]
    process = subprocess.Popen(command, env={**os.environ, **env}, stderr=subprocess.PIPE)
    with process:
        try:
            yield process
        finally:
            process.kill()


def until(condition: Callable[[], object], process: "subprocess.Popen[bytes] | None" = None) -> None:
    while not condition():
        assert process is None or process.poll() is None, "it has ended"
        time.sleep(0.02)


def test_sigterm_drains(source: Store, target: Store, tmp_path: Path) -> None:
    training = Training(source)
    training()
    with replicator(job(tmp_path)) as process:
        until(lambda: target.list("commits/"), process)
        for _ in range(5):
            training()
        process.terminate()
        assert process.wait() == 0
    assert_whole(target, *training.commits)
    assert [event.step for event in events(tmp_path, CheckpointReplicated)] == [1, 2, 3, 4, 5, 6]


def test_a_tier_that_is_down_holds_up_no_other(source: Store, target: Store, tmp_path: Path) -> None:
    training = Training(source)
    training()
    (tmp_path / "a file").touch()
    with replicator(job(tmp_path, str(tmp_path / "a file" / "x"), str(tmp_path / "target"))) as process:
        until(lambda: events(tmp_path, CheckpointReplicated), process)
        training()
        until(lambda: len(events(tmp_path, CheckpointReplicated)) == 2, process)
    assert_whole(target, *training.commits)
    assert {event.tier for event in events(tmp_path, CheckpointReplicated)} == {"file-3"}
    assert [event.tier for event in events(tmp_path, ReplicationFailed)] == ["file-2"]


@pytest.mark.parametrize("place", sorted(REPLICATION_PHASES))
def test_killed_and_started_again(source: Store, target: Store, tmp_path: Path, place: str) -> None:
    training = Training(source)
    training()
    training()
    (tmp_path / "kill_once.py").write_text(KILL_ONCE)
    env = {"HARNESS_PHASE_LISTENER": "kill_once:listen", "KILL_AT": place, "PYTHONPATH": f"{tmp_path}"}
    with replicator(job(tmp_path), **env) as process:
        assert process.wait() == -signal.SIGKILL
    training()
    with replicator(job(tmp_path)) as process:
        until(lambda: len(target.list("commits/")) == 3, process)
        process.terminate()
        assert process.wait() == 0
    assert_whole(target, *training.commits)


def test_it_ends_with_its_parent(source: Store, target: Store, tmp_path: Path) -> None:
    Training(source)()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, job(tmp_path)], stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        try:
            until(lambda: target.list("commits/"))
            parent.kill()
            parent.wait()
            until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
        finally:
            parent.kill()
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def test_it_ends_when_a_newer_attempt_starts(source: Store, target: Store, tmp_path: Path) -> None:
    training = Training(source)
    training()
    with replicator(job(tmp_path)) as process:
        until(lambda: target.list("commits/"), process)
        start_attempt(source, training.commits[0])
        assert process.wait() == Fenced.exit_code
        assert process.stderr and b"attempt 1 is over" in process.stderr.read()


def test_it_prunes_the_tier_that_it_writes_to(source: Store, target: Store, tmp_path: Path) -> None:
    training = Training(source)
    target.put("blobs/00/" + "0" * 64, b"left by a replicator that was killed")
    with replicator(job(tmp_path, keep={"file-2": Keep(newest=2).model_dump()})) as process:
        for _ in range(4):
            training()
            until(lambda: len(events(tmp_path, CheckpointReplicated)) == len(training.commits), process)
        until(lambda: len(target.list("manifests/")) == 3, process)
        process.terminate()
        assert process.wait() == 0
    assert_whole(target, *training.commits[2:])
    assert len(source.list("commits/")) == 4
    gone = events(tmp_path, CheckpointsPruned)
    assert [key for event in gone for key in event.commits] == [found.key for found in training.commits[:2]]
    assert {event.tier for event in gone} == {"file-2"} and gone[0].bytes_freed == 36


def test_no_room_for_the_replicators_log_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    tiers = SimpleNamespace(durable=[Tier("file", "", open_store(str(tmp_path)))] * 2)
    run: Any = SimpleNamespace(
        directory=tmp_path, urls=["file://"], attempt=SimpleNamespace(attempt=1), settings=Checkpoints(), tiers=tiers
    )
    with pytest.raises(StoreError, match=f"cannot make {tmp_path / 'logs'}"):
        Replicas().start(run)
