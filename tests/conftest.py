"""Settings all tests share; an object store and a proxy that breaks its traffic, started once, for tests that ask."""

import os
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import settings

from chaos.proxy import FaultProxy
from harness.weed import ACCESS_KEY, BUCKET, SECRET_KEY, Weed
from trainer.own_cluster import ON_LOOPBACK

# Before any test imports `trainer.cpu`, which looks once: what stands in for CUDA is there in whatever order tests run.
os.environ["HARNESS_DEVICE"] = "cpu"
# Before any imports Ray, which looks once too: every cluster that tests start is on loopback.
os.environ |= ON_LOOPBACK

# Examples are the same on every run, and a busy machine's slowness is no failure.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def weed() -> Iterator[Weed]:
    server = Weed()
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def _proxy(weed: Weed) -> Iterator[FaultProxy]:
    proxy = FaultProxy(lambda: ("127.0.0.1", weed.port), (ACCESS_KEY, SECRET_KEY))
    yield proxy
    proxy.close()


@pytest.fixture
def s3(weed: Weed) -> Iterator[Weed]:
    """The server, which the environment names, with the right credentials."""
    with weed.in_environment():
        yield weed


@pytest.fixture
def s3_url(s3: Weed) -> str:
    """A prefix that no other test uses."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def fault_proxy(s3: Weed, _proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy without rules, which the environment names in the server's place."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", _proxy.endpoint)
    yield _proxy
    _proxy.reset()
