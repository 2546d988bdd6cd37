"""What the tests of faults break: real processes, a store with one commit, a server behind a proxy."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from chaos import lasting
from chaos.directory import Fired, PlanDirectory, Site
from chaos.process import ProcessId
from chaos.scene import Scene
from chaos.witness import scene_of
from checkpointing.blobs import put_blob
from checkpointing.commit import commit, start_attempt
from checkpointing.manifest import Entry, Manifest, Shard
from checkpointing.store import open_store


def scene(folder: Path, fault: str, target: str, process: ProcessId | None = None, **rest: Any) -> Scene:
    """Of a fault that has been claimed: `rest` as in `Fired`, and `owner`."""
    owner = rest.pop("owner", None)
    fired = Fired(
        index=0,
        fault=fault,
        target=target,
        phase="train.optimizer",
        step=3,
        process=process,
        injector=ProcessId.current(),
        time=time.time(),
        **rest,
    )
    PlanDirectory(folder).claim(fired)
    return scene_of(PlanDirectory(folder), fired, owner)


def until[T](look: Callable[[], T], seconds: float = 20.0) -> T:
    deadline = time.monotonic() + seconds
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@contextmanager
def running(code: str, *arguments: object, program: Path | None = None, wait: bool = True) -> Iterator[ProcessId]:
    """A Python process in a session of its own that says "ready" when it is; ended with its session."""
    command = [str(program or sys.executable), "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None and (not wait or process.stdout.readline().strip() == "ready")
            yield ProcessId.of(process.pid)
        finally:
            os.killpg(process.pid, 9)


@contextmanager
def held(directory: PlanDirectory) -> Iterator[subprocess.Popen[bytes]]:
    """The process that holds fault 0; ended with the test, should it not end by itself."""
    holder = lasting.start(directory, 0)
    try:
        yield holder
    finally:
        holder.kill()
        holder.wait()


def store_with_commit(folder: Path) -> Site:
    """One commit with one entry of one rank, in `folder`."""
    store = open_store(f"file://{folder}")
    attempt = start_attempt(store, None)
    shard = Shard(rank=0, tensors=None, data=put_blob(store, b"a hundred bytes " * 6), tensor_digests={})
    entry = Entry.of("policy/rng", [shard])
    commit(store, attempt, Manifest(step=1, topology={"policy": 1}, entries={entry.name: entry}, run={}), None)
    return Site(stores={"store:file": f"file://{folder}"})


class Answers(BaseHTTPRequestHandler):
    """Everything is answered by 200 and a hundred bytes."""

    protocol_version = "HTTP/1.1"
    heard: list[str]

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.heard.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", "100")
        self.end_headers()
        self.wfile.write(b"x" * 100)

    do_POST = do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        """Not to the terminal."""


@contextmanager
def behind_a_proxy(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A server behind a proxy of its own process: (URL of the proxy, paths that the server has heard of)."""
    heard: list[str] = []
    handler = type("Handler", (Answers,), {"heard": heard})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    folder.mkdir()
    (folder / "upstream").write_text(f"127.0.0.1:{server.server_address[1]}")
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-m", "chaos.rules", str(folder)], env=env) as proxy:
        try:
            assert until((folder / "port").exists)
            yield f"http://127.0.0.1:{(folder / 'port').read_text()}", heard
        finally:
            proxy.kill()
            server.shutdown()
            server.server_close()
            thread.join()
