"""What stands in for a rank answers one question by itself, and everything else as the rank does."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest
import ray

from trainer.late import late

MADE: list[dict[str, Any]] = []


class Rank:
    def __init__(self, **arguments: Any) -> None:
        MADE.append(arguments)
        self.steps = 0

    def get_master_addr_port(self) -> tuple[str, int]:
        raise AssertionError("answered before the rank is made")

    def step(self, by: int = 1) -> int:
        self.steps += by
        return self.steps

    async def sync(self, name: str) -> str:
        return f"{name} at {self.steps}"

    @staticmethod
    def _hidden() -> str:
        return "SkyRL calls some of those too"


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    MADE.clear()
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "[fd00::1]")
    return late(Rank)(rank=0, master_addr=None, master_port=None)


def test_the_address_is_there_first_and_the_rank_is_made_with_it(rank: Any) -> None:
    address, port = rank.get_master_addr_port()
    assert address == "fd00::1" and 0 < port < 65536
    assert rank.get_master_addr_port() == (address, port), "asked again it is the same"
    assert MADE == []
    assert rank.step(by=2) == 2
    assert [{"rank": 0, "master_addr": address, "master_port": port}] == MADE


def test_a_rank_that_was_told_the_address_keeps_it() -> None:
    MADE.clear()
    rank: Any = late(Rank)(rank=1, master_addr="there", master_port=7)
    assert rank.get_master_addr_port() == ("there", 7)
    rank.step()
    assert MADE == [{"rank": 1, "master_addr": "there", "master_port": 7}]


def test_every_method_is_forwarded_to_one_rank(rank: Any) -> None:
    assert [rank.step(), rank.step()] == [1, 2]
    assert asyncio.run(rank.sync("weights")) == "weights at 2"
    assert rank._hidden() == "SkyRL calls some of those too"
    assert len(MADE) == 1


def test_ray_sees_the_methods_and_which_of_them_are_asynchronous() -> None:
    stand_in = late(Rank)
    kinds = {name: asyncio.iscoroutinefunction(vars(stand_in)[name]) for name in ("sync", "step")}
    assert kinds == {"sync": True, "step": False}
    assert stand_in.__name__ == "Rank" and stand_in.__module__ != Rank.__module__


def test_it_needs_nothing_heavy() -> None:
    code = (
        "import sys, trainer.late; print([n for n in ('torch', 'transformers', 'skyrl', 'vllm') if n in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
