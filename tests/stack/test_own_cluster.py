"""The cluster that a driver starts for itself: reached from this machine alone, and with its token."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from checkpointing.errors import ConfigError, WorkerLost
from trainer.determinism import environment
from trainer.own_cluster import own_cluster

START = """
import sys, types
import trainer.experiment as experiment
from trainer.setup import Setup
experiment.prepare_runtime_environment = lambda cfg: {}
experiment.topology = lambda cfg: {"policy": 1}
experiment.sync_registries = lambda: None
"""
"""What a driver does, without a model."""

HEAD = """
experiment.start_ray(None, Setup(Path(sys.argv[1]), "cpu", Checkpoints()))
import ray
ray.get(ray.remote(lambda: 0).remote())  # so that a worker listens as well
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""

JOIN = """
experiment.start_ray(None, Setup(Path(sys.argv[1]), "cpu", Checkpoints(), ray_address=sys.argv[2]))
print("joined")
"""

IMPORTS = (
    "from pathlib import Path\nfrom checkpointing.settings import Checkpoints\nfrom trainer.ending import end_process\n"
)


SLOW = """
import inspect, ray._private.node
assert "The current node timed out during startup" in inspect.getsource(ray._private.node)
def init(**_):
    raise Exception("The current node timed out during startup. This could happen because ...")
experiment.ray.init = init
experiment.start_ray(None, Setup(Path(sys.argv[1]), "cpu", Checkpoints(), ray_address=sys.argv[2]))
"""


def driver(body: str, *args: object, access: dict[str, str]) -> "subprocess.Popen[str]":
    lines = "".join(f"    {line}\n" for line in (START + body).splitlines())
    code = f"{IMPORTS}def main():\n{lines}end_process(main)\n"
    outside = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        env=outside | environment("cpu") | {"RAY_USAGE_STATS_ENABLED": "0"} | access,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, "subprocess.Popen[str]", dict[str, str]]]:
    access = own_cluster()
    process = driver(HEAD, tmp_path_factory.mktemp("head"), access=access)
    assert process.stdin and process.stdout and process.stderr
    address = process.stdout.readline().strip()
    yield address, process, access
    _, said = process.communicate("")
    assert address and access["RAY_AUTH_TOKEN"] not in said, said


def test_it_listens_on_loopback_alone(head: tuple[str, "subprocess.Popen[str]", dict[str, str]]) -> None:
    address, process, _ = head
    assert address.startswith("127.0.0.1:")
    driver = psutil.Process(process.pid)
    names, open_to_all = set(), []
    for one in [driver, *driver.children(recursive=True)]:
        for connection in one.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                names.add(one.name())
                if connection.laddr.ip.removeprefix("::ffff:") != "127.0.0.1":
                    open_to_all.append((one.name(), connection.laddr))
    assert {"gcs_server", "raylet"} <= names and open_to_all == []


@pytest.mark.parametrize("token", [None, "wrong" * 10], ids=["no token", "wrong token"])
def test_without_its_token_nobody_joins(
    head: tuple[str, "subprocess.Popen[str]", dict[str, str]], tmp_path: Path, token: str | None
) -> None:
    address, _, access = head
    known = {name: value for name, value in access.items() if not name.startswith("RAY_AUTH")}
    if token:
        known |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    process = driver(JOIN, tmp_path, address, access=known)
    out, said = process.communicate()
    assert process.returncode == ConfigError.exit_code and "joined" not in out
    last = said.strip().splitlines()[-1]
    assert f"the cluster at {address} does not take this token, or asks for one: set RAY_AUTH_MODE=token" in last
    assert access["RAY_AUTH_TOKEN"] not in said and not (token and token in said)


@pytest.mark.parametrize(("address", "code"), [("local", WorkerLost.exit_code), ("127.0.0.1:6379", 1)])
def test_one_that_is_not_there_in_time_is_nobody_s_bug(tmp_path: Path, address: str, code: int) -> None:
    process = driver(SLOW, tmp_path, address, access={})
    _, said = process.communicate("")
    assert process.returncode == code, said
    assert "The current node timed out during startup" in said
