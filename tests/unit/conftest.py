"""Stores that many tests begin with."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointing.store import Store, open_store

from .checkpoint_samples import without_fsync


@pytest.fixture
def unsynced() -> Iterator[None]:
    with without_fsync():
        yield


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def source(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "source"))


@pytest.fixture
def target(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "target"))


@pytest.fixture(autouse=True)
def _as_nice_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gives way to training must not slow down all tests after it."""
    monkeypatch.setattr(os, "nice", lambda increment: increment)
