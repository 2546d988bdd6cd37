"""Nothing listens beyond this machine unless it was told to: what can be seen without starting it. (Ray's own ports:
tests/stack/test_own_cluster.py; the router's: test_client.py)"""

import json
import sys
from pathlib import Path

import psutil
import pytest

import trainer.entrypoint
from chaos.proxy import FaultProxy
from checkpointing.errors import ConfigError
from harness.config import RunConfig, load_config
from harness.driver_process import start_driver
from harness.weed import Weed
from trainer.engine import engine_command
from trainer.own_cluster import own_cluster


@pytest.mark.parametrize("name", ["host", "port", "uds", "api-key", "api_key"])
def test_where_an_engine_listens_can_not_be_configured(tmp_path: Path, name: str) -> None:
    (tmp_path / "run.yaml").write_text(
        json.dumps({"run_dir": "r", "engines": {"args": {name: "0.0.0.0"}}, "skyrl": {}})
    )
    with pytest.raises(
        ConfigError, match=rf"engines\.args: .*{name} is not yours to set: engines listen on 127\.0\.0\.1"
    ):
        load_config(tmp_path / "run.yaml", RunConfig)


def test_an_engine_is_told_to_listen_on_loopback() -> None:
    command = engine_command("model", 1234, 0, "bfloat16", "cpu", {})
    assert command[command.index("--host") + 1] == "127.0.0.1"


def test_the_servers_of_drills_listen_on_loopback(weed: Weed, fault_proxy: FaultProxy) -> None:
    assert weed._process
    for process in (psutil.Process(weed._process.pid), psutil.Process()):  # the proxy is a thread of this one
        heard = {one.laddr.ip for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN}
        assert heard == {"127.0.0.1"}


def test_each_cluster_of_a_run_has_a_token_of_its_own() -> None:
    tokens = {own_cluster()["RAY_AUTH_TOKEN"] for _ in range(2)}
    assert len(tokens) == 2 and all(len(token) == 64 for token in tokens)


@pytest.mark.parametrize(("address", "ours"), [("local", True), ("ray-head:6379", False)])
def test_a_driver_has_a_token_for_the_cluster_that_it_starts_and_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, ours: bool
) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr("harness.driver_process.spawn", lambda command, env, log, ledger: seen.append(dict(env)))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of the cluster of others")
    monkeypatch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")  # which all tests have
    config = RunConfig(run_dir=tmp_path, device="cpu", ray_address=address, skyrl={})
    for attempt in (1, 2):
        start_driver(config, [], attempt, None, {})
    assert ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" in seen[0]) == ours
    assert (seen[0].get("RAY_AUTH_MODE") == "token") == ours
    assert (seen[0]["RAY_AUTH_TOKEN"] != "of the cluster of others") == ours


@pytest.mark.parametrize(("address", "ours"), [(None, True), ("local", True), ("ray-head:6379", False)])
def test_so_has_one_that_is_started_without_a_supervisor(
    monkeypatch: pytest.MonkeyPatch, address: str | None, ours: bool
) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr("trainer.entrypoint.os.execve", lambda path, args, env: seen.append(dict(env)))
    monkeypatch.setattr(sys, "argv", ["main"])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    trainer.entrypoint.main()
    assert (seen[0].get("RAY_AUTH_MODE") == "token") == ours
