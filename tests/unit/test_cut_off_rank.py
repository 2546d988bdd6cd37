"""Real packets between real processes: each "rank" sends the other a byte again and again, and says how many came."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from chaos import faults
from chaos.directory import PlanDirectory
from chaos.process import ProcessId
from checkpointing.errors import ConfigError

from .fault_samples import running, scene, until

FAULT = faults.find("cut_off_rank")
needs_filter = pytest.mark.skipif(FAULT.available() is not None, reason=str(FAULT.available()))

RANK = """
import socket, sys, threading, time
from pathlib import Path
folder, me, peer = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if me == "policy:0":
    listening = socket.create_server(("127.0.0.1", 0))
    (folder / "port.tmp").write_text(str(listening.getsockname()[1]))
    (folder / "port.tmp").rename(folder / "port")
    print("ready", flush=True)
    connection, _ = listening.accept()
else:
    connection = socket.create_connection(("127.0.0.1", int((folder / "port").read_text())))
    print("ready", flush=True)
def send():
    while True:
        connection.sendall(b"x")
        time.sleep(0.01)
threading.Thread(target=send, daemon=True).start()
while True:
    connection.recv(1)
    with (folder / f"heard-by-{me[-1]}").open("a") as heard:
        heard.write("x")
"""


class Two:
    """Two ranks that hear each other, announced in `plan`."""

    def __init__(self, folder: Path, ranks: list[ProcessId]) -> None:
        self._folder, self.ranks, self.plan = folder, ranks, folder / "plan"
        for index, rank in enumerate(ranks):
            PlanDirectory(self.plan).announce(f"policy:{index}", rank)
        PlanDirectory(self.plan).announce("driver", ProcessId.current())

    def heard(self, rank: int) -> int:
        path = self._folder / f"heard-by-{rank}"
        return path.stat().st_size if path.exists() else 0

    def hear(self) -> bool:
        """Whether both hear something new soon."""
        before = self.heard(0), self.heard(1)
        return until(lambda: self.heard(0) > before[0] and self.heard(1) > before[1], 3.0)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with ExitStack() as stack:
        names = "policy:0", "policy:1"
        started = [stack.enter_context(running(RANK, tmp_path, me, you)) for me, you in (names, names[::-1])]
        made = Two(tmp_path, started)
        assert made.hear()
        yield made


@needs_filter
def test_neither_hears_the_other_until_it_is_healed(two: Two) -> None:
    at = scene(two.plan, "cut_off_rank", "policy:1", two.ranks[1], seconds=60)
    assert FAULT.witness(at) is None
    FAULT.inject(at)
    try:
        time.sleep(0.2)  # for what was under way
        before = two.heard(0), two.heard(1)
        assert "packets between policy:1 and other ranks were dropped" in (until(lambda: FAULT.witness(at)) or "")
        time.sleep(1.0)
        assert (two.heard(0), two.heard(1)) == before
        with socket.create_server(("127.0.0.1", 0)) as server:  # nobody else notices
            socket.create_connection(server.getsockname(), timeout=1).close()
    finally:
        FAULT.heal(at)
    FAULT.heal(at)
    assert FAULT.witness(at) is None
    assert until(two.hear), "TCP sends again what was dropped"


@needs_filter
def test_a_filter_that_meets_nothing_is_not_seen(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAULT, "_ports", lambda rank: {(1, 2), (2, 1)})
    at = scene(two.plan, "cut_off_rank", "policy:1", two.ranks[1], seconds=60)
    FAULT.inject(at)
    try:
        assert not until(lambda: FAULT.witness(at), 1.0)
        assert two.hear()
    finally:
        FAULT.heal(at)


@needs_filter
def test_what_has_no_peers_can_t_be_cut_off(two: Two) -> None:
    with pytest.raises(ConfigError, match="driver is no rank"):
        FAULT.inject(scene(two.plan, "cut_off_rank", "driver", ProcessId.current()))
    PlanDirectory(two.plan).announce("policy:0", ProcessId.current())
    with pytest.raises(ConfigError, match="policy:1 has no TCP connection to another rank"):
        FAULT.inject(scene(two.plan, "cut_off_rank", "policy:1", two.ranks[1]))


def test_it_says_why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert FAULT.available() == "packets can't be filtered here: nft is not installed"
    nft = tmp_path / "nft"
    nft.write_text("#!/bin/sh\necho 'Operation not permitted (you must be root)' >&2\nexit 1\n")
    nft.chmod(0o755)
    assert "you must be root" in (FAULT.available() or "")
