"""An answer is the same whether it is heard in pieces, interrupted, or begun by someone else; against a real server."""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

from trainer import client as patient
from trainer.client import PatientClient
from trainer.generation import SeededClient
from trainer.rollouts import Rollouts
from trainer.streaming import can_go_on, stream

PARAMS = {"temperature": 1.0, "max_tokens": 12, "min_tokens": 1, "logprobs": 1, "stop": None, "seed": 5}
LAST = 0
"""A token that ends a generation."""


class Server:
    """Speaks vLLM's `/inference/v1/generate`. A token depends on seed, position and all tokens before it."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.drawn = 0
        self.hang_up_after: list[int] = []
        """For the next requests: tokens after which the connection is cut."""
        self.politely = False
        """The stream ends in good order instead, as a proxy ends it whose engine has died."""
        self.refuse = 0
        self.adapters = ["base", "skyrl-lora"]

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": name} for name in self.adapters]})

    async def load(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.adapters.append(body["lora_name"])
        return web.json_response({"status": "ok", "path": body["lora_path"]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.asked.append(body)
        if self.refuse:
            return web.json_response({"error": {"message": "no such adapter"}}, status=self.refuse)
        tokens, choices = list(body["token_ids"]), []
        params = body["sampling_params"]
        for count in range(1, params["max_tokens"] + 1):
            digest = hashlib.sha256(f"{params['seed']}/{len(tokens)}/{tokens}".encode()).digest()
            token = digest[0] % 15
            tokens.append(token)
            reason = "stop" if token == LAST else "length" if count == params["max_tokens"] else None
            logprobs = {"content": [{"logprob": -digest[1] / 7}]} if params["logprobs"] is not None else None
            choices.append({"index": 0, "token_ids": [token], "logprobs": logprobs, "finish_reason": reason})
            if reason:
                break
        if not body.get("stream"):
            return web.json_response({"choices": [_joined(choices)]})
        cut = self.hang_up_after.pop(0) if self.hang_up_after else len(choices) + 1
        response = web.StreamResponse()
        await response.prepare(request)
        for choice in choices[:cut]:
            event = b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n"
            for half in (event[:9], event[9:]):  # events need not come in one piece
                await response.write(half)
            self.drawn += 1
        if cut <= len(choices):
            assert request.transport is not None
            if not self.politely:
                request.transport.close()
            return response
        await response.write(b"data: [DONE]\n\n")
        return response


def _joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    joined = dict(choices[-1], token_ids=[token for choice in choices for token in choice["token_ids"]])
    if joined["logprobs"] is not None:
        joined["logprobs"] = {"content": [item for choice in choices for item in choice["logprobs"]["content"]]}
    return joined


class Tokenizer:
    def batch_decode(self, ids: list[list[int]]) -> list[str]:
        return [" ".join(map(str, row)) for row in ids]


Work = Callable[[PatientClient], Coroutine[Any, Any, Any]]


def with_client(server: Server, work: Work) -> Any:
    async def main() -> Any:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", server.answer)
        app.router.add_get("/v1/models", server.models)
        app.router.add_post("/skyrl/v1/load_lora_adapter", server.load)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        plain = RemoteInferenceClient(
            proxy_url=url, server_urls=[url], data_parallel_size=1, tokenizer=Tokenizer(), model_name="base"
        )
        client = PatientClient.of(plain, "adapter", 600.0)
        try:
            return await work(client)
        finally:
            await client._get_generate_client().aclose()
            await runner.cleanup()

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(_seconds: float) -> None:
        pass

    monkeypatch.setattr(patient, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": at_once}))


def request(number: int, **params: Any) -> dict[str, Any]:
    return {
        "prompt_token_ids": [[number, 9]],
        "session_ids": [f"uid{number}_0"],
        "sampling_params": PARAMS | params,
        "cache_salt": "salt",
    }


def unheard(offset: int, tokens: list[int], logprobs: list[float] | None) -> None:
    pass


@pytest.mark.parametrize("params", [{}, {"logprobs": None}])
def test_heard_in_pieces_it_is_what_skyrl_s_client_returns(params: dict[str, Any]) -> None:
    pieces: dict[int, list[Any]] = {number: [] for number in range(20)}

    async def work(client: PatientClient) -> None:
        for number in range(20):
            expected = await client.generate(request(number, **params))
            heard = pieces[number]
            said = await stream(
                client, request(number, **params), None, [], None, lambda *piece, heard=heard: heard.append(piece)
            )
            assert said == expected and list(said) == list(expected)
            (tokens,) = expected["response_ids"]
            assert [token for _, piece, _ in heard for token in piece] == tokens[:-1], "all but what finishes it"
            assert [offset for offset, _, _ in heard] == list(range(len(tokens) - 1))
            assert all((scores is None) == ("logprobs" in params) for _, _, scores in heard)

    with_client(Server(), work)


def test_it_goes_on_after_any_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()

    async def work(client: PatientClient) -> None:
        for number in range(20):
            whole = await client.generate(request(number))
            (tokens,), (logprobs,) = whole["response_ids"], whole["response_logprobs"]
            for begun in range(len(tokens)):
                server.drawn = 0
                said = await stream(client, request(number), None, tokens[:begun], logprobs[:begun], unheard)
                assert said == whole
                assert server.drawn == len(tokens) - begun

    with_client(server, work)
    sent = server.asked[-1]
    assert sent["sampling_params"]["max_tokens"] == 12 - (len(sent["token_ids"]) - 2)
    assert sent["sampling_params"]["min_tokens"] == 0 and sent["cache_salt"] == "salt" and sent["model"] == "base"
    assert sent["sampling_params"]["stream_interval"] == 1


def test_a_beginning_that_is_the_whole_is_drawn_again_at_its_end() -> None:
    async def first_long(client: PatientClient) -> None:
        for number in range(50):
            whole = await client.generate(request(number))
            if whole["stop_reasons"] == ["length"]:
                (tokens,), (logprobs,) = whole["response_ids"], whole["response_logprobs"]
                assert await stream(client, request(number), None, tokens, logprobs, unheard) == whole
                return
        raise AssertionError("no answer was long enough")

    with_client(Server(), first_long)


@pytest.mark.parametrize("politely", [False, True])
def test_an_engine_that_is_lost_costs_nothing_that_was_heard(politely: bool) -> None:
    server = Server()
    server.politely = politely

    async def work(client: PatientClient) -> None:
        for number in range(20):
            expected = await client.generate(request(number))
            server.hang_up_after = [2, 0, 1]
            server.drawn = 0
            heard: list[int] = []

            def hear(offset: int, tokens: list[int], _: Any, heard: list[int] = heard) -> None:
                heard.append(offset)

            assert await stream(client, request(number), None, [], None, hear) == expected
            assert server.drawn == len(expected["response_ids"][0]), "nothing is drawn twice"
            assert heard == list(range(len(heard)))

    with_client(server, work)


def test_an_engine_that_refuses_is_an_error_at_once() -> None:
    server = Server()
    server.refuse = 400

    async def work(client: PatientClient) -> None:
        with pytest.raises(aiohttp.ClientResponseError, match="no such adapter"):
            await stream(client, request(1), None, [], None, unheard)

    with_client(server, work)
    assert len(server.asked) == 1


def test_an_engine_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    server.hang_up_after = [0] * 100

    async def work(client: PatientClient) -> None:
        with pytest.raises(aiohttp.ClientError):
            await stream(client, request(1), None, [], None, unheard)

    with_client(server, work)
    assert len(server.asked) == patient.SENSELESS + 1


def test_what_looks_at_the_generated_text_is_not_continued() -> None:
    assert can_go_on(request(1)) and can_go_on(request(1, top_k=5, stop=[]))
    for params in ({"stop": ["</a>"]}, {"presence_penalty": 0.5}, {"bad_words": ["x"]}, {"max_tokens": None}):
        assert not can_go_on(request(1, **params)), params
    assert not can_go_on(request(1) | {"return_sample_support": True})
    unseeded = request(1)
    del unseeded["sampling_params"]["seed"]
    assert not can_go_on(unseeded)


class Killed(BaseException):
    pass


async def _all(client: Any, count: int) -> list[Any]:
    requests = [request(number) for number in range(count)]
    return list(await asyncio.gather(*(client.generate(dict(one)) for one in requests)))


def seeded(run_dir: Path, attempt: int, client: Any) -> tuple[Rollouts, SeededClient]:
    run: Any = SimpleNamespace(directory=run_dir, attempt=SimpleNamespace(attempt=attempt))
    rollouts = Rollouts(run, "engine", continuation=True)
    rollouts.synced(0, "weights")
    made = SeededClient(client, 1, rollouts)
    made.begin("train", 1)
    return rollouts, made


def test_a_step_killed_in_mid_generation_draws_only_the_tokens_that_were_not(tmp_path: Path) -> None:
    server, count = Server(), 30

    async def work(client: PatientClient) -> None:
        _, whole = seeded(tmp_path / "whole", 1, client)
        expected = await _all(whole, count)
        drawn = sum(len(output["response_ids"][0]) for output in expected)
        for attempt in (1, 2):
            rollouts, killed = seeded(tmp_path / "run", attempt, client)
            keep, heard = rollouts._append, iter(range(drawn // 3))

            def dying(*piece: Any, keep: Any = keep, heard: Any = heard) -> None:
                if next(heard, None) is None:
                    raise Killed
                keep(*piece)

            rollouts._append = dying  # type: ignore[assignment, method-assign]
            outcomes = await asyncio.gather(
                *(killed.generate(request(number)) for number in range(count)), return_exceptions=True
            )
            assert any(isinstance(outcome, Killed) for outcome in outcomes)
        rollouts, last = seeded(tmp_path / "run", 3, client)
        server.drawn = 0
        assert await _all(last, count) == expected
        tokens = rollouts.take_tokens("train")
        assert tokens["tokens_generated"] == server.drawn
        assert tokens["tokens_reused"] >= 2 * (drawn // 3) and sum(tokens.values()) == drawn
        rollouts, again = seeded(tmp_path / "run", 4, client)
        assert await _all(again, count) == expected
        assert rollouts.take_tokens("train") == {"tokens_generated": 0, "tokens_reused": drawn}

    with_client(server, work)
