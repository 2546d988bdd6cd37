"""A Ray head on loopback with its dashboard on: a cluster for runs that start none, and for `harness submit`."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from harness.processes import free_port, reap, spawn
from trainer.determinism import environment

PATIENCE = 600.0
"""Seconds, on a machine that does other work besides, after which what is waited for does not come."""

_AGENT = "--dashboard-agent-listen-port"
_PORTS = (
    "--port", "--dashboard-port", _AGENT, "--dashboard-agent-grpc-port", "--runtime-env-agent-port",
    "--metrics-export-port", "--ray-client-server-port",
)  # fmt: skip
"""All that Ray would not choose by itself. Another cluster on this machine may have the defaults."""


_ENV = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # take 127.0.0.1 at its word
    "RAY_agent_register_timeout_ms": f"{PATIENCE:.0f}000",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": f"{PATIENCE:.0f}",
    "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": f"{PATIENCE:.0f}",
}


def until(look: Callable[[], bool], said: Callable[[], str]) -> None:
    """Wait for it. If it does not come, what it `said` is shown."""
    deadline = time.monotonic() + PATIENCE
    while not look():
        assert time.monotonic() < deadline, said()[-2000:]
        time.sleep(0.2)


class Head:
    """`env`: beside this process's own. Jobs are run with what the head was started with."""

    def __init__(self, folder: Path, env: dict[str, str], cpus: int = 1, gpus: int = 0) -> None:
        self._folder, self._env, self._cpus, self._gpus = folder, env, cpus, gpus
        self._process: subprocess.Popen[bytes] | None = None
        self.url, self.address, self._agent = "", "", ""

    def start(self) -> None:
        ports = {name: free_port() for name in _PORTS}
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
        command += ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", "--include-dashboard=true"]
        command += [f"--num-cpus={self._cpus}", f"--num-gpus={self._gpus}"]
        command += [f"{name}={port}" for name, port in ports.items()]
        env = os.environ | environment("cpu") | _ENV | self._env
        self._process = spawn(command, env, self._folder / "head.log", self._folder / "sessions")
        self.url, self._agent = (f"http://127.0.0.1:{ports[port]}" for port in ("--dashboard-port", _AGENT))
        self.address = f"127.0.0.1:{ports['--port']}"
        until(self._answers, (self._folder / "head.log").read_text)

    def kill(self) -> None:
        """With SIGKILL, and all that it has started with it, jobs too: as a pod is lost."""
        running = self._process is not None and self._process.poll() is None
        begun = psutil.Process(self._process.pid).children(recursive=True) if self._process and running else []
        reap(self._folder / "sessions")  # first, while it can be told what shared memory they have
        for process in begun:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process is not None:
            self._process.wait()

    def _answers(self) -> bool:
        """Both that take part in a submission, by what KubeRay asks a pod of a head."""
        if self._process is not None and self._process.poll() is not None:
            raise RuntimeError((self._folder / "head.log").read_text()[-2000:])
        try:
            for url in (f"{self.url}/api/gcs_healthz", f"{self._agent}/api/local_raylet_healthz"):
                httpx.get(url, timeout=5).raise_for_status()
        except httpx.HTTPError:
            return False
        return True
