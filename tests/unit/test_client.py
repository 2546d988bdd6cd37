"""An engine that dies and comes back is given the adapter before it is asked again; against real servers."""

import asyncio
import copy
import inspect
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web
from skyrl.backends.skyrl_train.inference_servers import common, vllm_router
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.backends.skyrl_train.inference_servers.vllm_router import VLLMRouter
from vllm_router.router_args import RouterArgs

from checkpointing.errors import WorkerLost
from harness.processes import free_port
from trainer import client as patient
from trainer.client import PatientClient, let_router_start

LORA = "skyrl-lora"
ANSWER = {"choices": [{"token_ids": [7, 8], "finish_reason": "stop", "logprobs": None}]}
REQUEST: dict[str, Any] = {"prompt_token_ids": [[1]], "session_ids": ["u_0"], "sampling_params": {"max_tokens": 2}}


class Engine:
    """A server on a port of its own that can die and be started anew, knowing no adapter then."""

    def __init__(self) -> None:
        self.port = free_port()
        self.adapters: set[str] = set()
        self.asked: list[str] = []
        self.broken = self.loads = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._models)
        app.router.add_post("/skyrl/v1/load_lora_adapter", self._load)
        self.adapters, self.loads = set(), 0
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def die(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _generate(self, request: web.Request) -> web.Response:
        model = (await request.json())["model"]
        self.asked.append(model)
        if self.broken:
            return web.json_response({"error": {"message": "broken"}}, status=self.broken)
        if model not in self.adapters:
            return web.json_response({"error": {"message": f"the model {model} does not exist"}}, status=404)
        return web.json_response(ANSWER)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in ("base", *self.adapters)]})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["lora_path"] == "/adapter"
        self.loads += 1
        self.adapters.add(body["lora_name"])
        return web.json_response({"status": "ok"})


class Tokenizer:
    def batch_decode(self, ids: list[list[int]]) -> list[str]:
        return ["" for _ in ids]


def run(work: Callable[..., Coroutine[Any, Any, None]], count: int = 1, patience: float = 600.0) -> None:
    """work(client, *engines), which all serve."""

    async def main() -> None:
        engines = [Engine() for _ in range(count)]
        urls = [engine.url for engine in engines]
        plain = RemoteInferenceClient(
            proxy_url=urls[0], server_urls=urls, data_parallel_size=1, tokenizer=Tokenizer(), uses_lora_weight_sync=True
        )
        client = PatientClient.of(plain, "/adapter", patience)
        try:
            for engine in engines:
                await engine.start()
            await client.load_lora_adapter(LORA, "/adapter")
            await work(client, *engines)
        finally:
            await client._get_generate_client().aclose()
            for engine in engines:
                await engine.die()

    asyncio.run(main())


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def a_moment(_seconds: float) -> None:
        await asyncio.sleep(0.01)

    monkeypatch.setattr(patient, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": a_moment}))


def test_one_that_was_started_anew_is_given_the_adapter_and_asked_again() -> None:
    async def work(client: PatientClient, engine: Engine) -> None:
        await engine.die()
        await engine.start()
        answer = await client.generate(REQUEST, LORA)
        assert answer["response_ids"] == [[7, 8]]
        assert engine.asked == [LORA, LORA] and engine.adapters == {LORA}

    run(work)


def test_many_requests_bring_it_up_to_date_once() -> None:
    async def work(client: PatientClient, engine: Engine) -> None:
        await engine.die()
        await engine.start()
        answers = await asyncio.gather(*(client.generate(REQUEST, LORA) for _ in range(8)))
        assert [answer["response_ids"] for answer in answers] == [[[7, 8]]] * 8
        assert engine.loads == 1

    run(work)


class Gone(PatientClient):
    async def _complete(self, url: str) -> bool:
        raise aiohttp.ClientConnectionError("nobody listens there")


def test_who_waited_in_a_loop_that_was_closed_keeps_nobody_in_the_next_one_waiting() -> None:
    plain = RemoteInferenceClient(proxy_url="http://gone", server_urls=["http://gone"], data_parallel_size=1)
    client = Gone.of(plain, "/adapter", 600.0)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.until_all_serve(), 0.1)

    asyncio.run(give_up())
    asyncio.run(give_up())


def test_one_that_is_gone_is_waited_for() -> None:
    async def work(client: PatientClient, engine: Engine) -> None:
        await engine.die()
        waiting = asyncio.ensure_future(client.until_all_serve())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await engine.start()
        assert await waiting
        assert engine.adapters == {LORA}
        assert not await client.until_all_serve(), "nothing is missing now"

    run(work)


def test_a_weight_sync_is_complete_when_every_engine_has_it() -> None:
    async def work(client: PatientClient, one: Engine, other: Engine) -> None:
        await other.die()
        sync = asyncio.ensure_future(client.load_lora_adapter(LORA, "/adapter"))
        await asyncio.sleep(0.1)
        assert not sync.done(), "one of them serves, and the sync still waits for the other"
        await other.start()
        assert set(await sync) == {one.url, other.url}
        assert other.adapters == {LORA}

    run(work, count=2)


def test_one_that_does_not_come_back_is_lost() -> None:
    async def work(client: PatientClient, engine: Engine) -> None:
        await engine.die()
        with pytest.raises(WorkerLost, match=f"{engine.url} was gone for 0 s"):
            await client.until_all_serve()

    run(work, patience=0.0)


@pytest.mark.parametrize(("status", "times"), [(400, 1), (500, patient.SENSELESS + 1), (404, patient.SENSELESS + 1)])
def test_one_that_has_all_it_needs_and_refuses_is_an_error(status: int, times: int) -> None:
    async def work(client: PatientClient, engine: Engine) -> None:
        engine.broken = status
        with pytest.raises(aiohttp.ClientResponseError, match="broken"):
            await client.generate(REQUEST, LORA)
        assert len(engine.asked) == times

    run(work)


def test_the_rank_that_syncs_gets_a_copy_that_waits_too() -> None:
    async def work(client: PatientClient, engine: Engine) -> None:
        sent = copy.copy(client)  # by the same two methods that Ray's serializer calls
        assert isinstance(sent, PatientClient)
        assert (sent.adapter, sent.patience) == ("/adapter", 600.0)

    run(work)


def test_the_router_in_front_of_several_engines_has_what_skyrl_asks_it_for() -> None:
    """Of its arguments, in the method that starts it."""
    let_router_start()
    source = inspect.getsource(VLLMRouter.start)
    asked = set(re.findall(r"_router_args\.(\w+)", source))
    assert "port" in asked and [name for name in sorted(asked) if not hasattr(RouterArgs(), name)] == []


def test_the_router_listens_at_the_nodes_address_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one, in front of an engine."""
    source = Path(common.__file__).with_name("utils.py").read_text()  # importing it takes vLLM
    assert "default_bind_host,\n" in source and "host=default_bind_host(get_node_ip())," in source
    monkeypatch.setattr(common, "get_node_ip", lambda: "127.0.0.1")  # as in a cluster of our own
    monkeypatch.setattr(vllm_router, "get_node_ip", lambda: "127.0.0.1")
    let_router_start()

    async def work(client: PatientClient, engine: Engine) -> None:
        address = common.default_bind_host(common.get_node_ip())
        router = VLLMRouter(RouterArgs(host=address, port=free_port(), worker_urls=[engine.url]))
        await asyncio.to_thread(router.start)
        try:
            assert router._process and router._process.pid
            opened = psutil.Process(router._process.pid).net_connections("inet")
            heard = {one.laddr for one in opened if one.status == psutil.CONN_LISTEN and one.laddr.port != engine.port}
            assert len(heard) >= 2 and {address.ip for address in heard} == {"127.0.0.1"}
        finally:
            router.shutdown()

    run(work)
