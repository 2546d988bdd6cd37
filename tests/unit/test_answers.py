"""An answer that can't be one is asked for again, and nobody sees it: not the trainer, not the journal."""

import asyncio
import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from tenacity import wait_none

from checkpointing.errors import WorkerLost
from checkpointing.events import GenerationRejected
from checkpointing.generations import Generation, GenerationLog
from checkpointing.journal import Journal, read_journal
from trainer import answers
from trainer.answers import ASKS, Malformed, require_full_length, require_sound, vocabulary_of
from trainer.client import PatientClient
from trainer.generation import SeededClient
from trainer.rollouts import Rollouts

from .test_streaming import Server, Tokenizer, with_client

VOCABULARY = 300
REQUEST: dict[str, Any] = {
    "prompt_token_ids": [[1, 2]],
    "session_ids": ["uid_3"],
    "sampling_params": {"max_tokens": 3, "logprobs": 0},
}
SOUND: dict[str, Any] = {
    "responses": ["text"],
    "stop_reasons": ["stop"],
    "response_ids": [[5, VOCABULARY - 1]],
    "response_logprobs": [[-0.5, 0.0]],
    "rollout_expert_indices": None,
    "rollout_sample_support": None,
}
MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"response_ids": [[]], "response_logprobs": [[]], "responses": [""]}, "no tokens"),
    ({"response_ids": [], "response_logprobs": []}, "0 response_ids"),
    ({"response_ids": [[5, 6], [7]]}, "2 response_ids"),
    ({"stop_reasons": []}, "0 stop_reasons"),
    ({"responses": ["a", "b"]}, "2 responses"),
    ({"responses": [None]}, "no text"),
    ({"response_logprobs": [[-1.0, -1.0], [-1.0]]}, "more or less than one"),
    ({"response_ids": [[1, 2, 3, 4]], "response_logprobs": [[-1.0] * 4]}, "4 tokens where at most 3"),
    ({"response_ids": [[5, VOCABULARY]]}, f"{VOCABULARY} is no token"),
    ({"response_ids": [[-1, 5]]}, "-1 is no token"),
    ({"response_ids": [[5, True]]}, "True is no token"),
    ({"response_ids": [[5.0, 6]]}, "5.0 is no token"),
    ({"response_ids": [[5, None]]}, "None is no token"),
    ({"response_logprobs": None}, "no log-probabilities"),
    ({"response_logprobs": [None]}, "no log-probabilities"),
    ({"response_logprobs": [[-1.0]]}, "1 log-probabilities of 2 tokens"),
    ({"response_logprobs": [[-1.0, math.nan]]}, "nan is no log-probability"),
    ({"response_logprobs": [[-math.inf, -1.0]]}, "-inf is no log-probability"),
    ({"response_logprobs": [[-1.0, 0.1]]}, "0.1 is no log-probability"),
    ({"response_logprobs": [[-1.0, None]]}, "None is no log-probability"),
    ({"stop_reasons": ["abort"]}, "it ended for 'abort'"),
    ({"stop_reasons": ["error"]}, "it ended for 'error'"),
    ({"stop_reasons": [None]}, "it ended for None"),
    ({"stop_reasons": ["length"]}, "after 2 of 3 tokens, with room for 256"),
]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "WAIT", wait_none())


@pytest.fixture(autouse=True)
def context_length(monkeypatch: pytest.MonkeyPatch) -> None:
    async def room(_client: Any) -> int:
        return 256

    monkeypatch.setattr(answers, "_context_length", room)


class Engine:
    """Gives these answers in turn, the last one for ever; an exception is raised."""

    def __init__(self, *given: Any) -> None:
        self.given, self.asked = list(given), 0

    async def generate(self, input_batch: Any, model: str | None = None) -> Any:
        self.asked += 1
        answer = self.given.pop(0) if len(self.given) > 1 else self.given[0]
        if isinstance(answer, Exception):
            raise answer
        return copy.deepcopy(answer)


def ask(run_dir: Path, number: int, engine: Any) -> Any:
    """What a trajectory in step 7 of attempt `number` is answered."""
    journal = Journal(run_dir, "driver", number)
    run: Any = SimpleNamespace(directory=run_dir, attempt=SimpleNamespace(attempt=number), journal=journal)
    rollouts = Rollouts(run, "engine", vocabulary=VOCABULARY)
    rollouts.synced(6, "weights")
    client = SeededClient(engine, 1, rollouts)
    client.begin("train", 7)
    try:
        return asyncio.run(client.generate(copy.deepcopy(REQUEST), "adapter"))
    finally:
        rollouts.close()
        journal.close()


def rejections(run_dir: Path) -> list[GenerationRejected]:
    return [record.event for record in read_journal(run_dir) if isinstance(record.event, GenerationRejected)]


def test_what_an_engine_in_order_answers_is_sound() -> None:
    for change in (
        {},
        {"stop_reasons": ["repetition"]},
        {"response_logprobs": [[-9999.0, 1e-6]]},
        {"stop_reasons": ["length"], "response_ids": [[0, 0, 0]], "response_logprobs": [[-1.0, -1, -1.0]]},
    ):
        require_sound(SOUND | change, REQUEST, VOCABULARY)
    require_sound(SOUND | {"response_logprobs": None}, REQUEST | {"sampling_params": {}}, None)


@pytest.mark.parametrize(("change", "reason"), MALFORMED)
def test_a_malformed_answer_is_asked_for_again_and_not_kept(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    engine = Engine(SOUND | change, SOUND)
    assert ask(tmp_path, 1, engine) == SOUND and engine.asked == 2
    (rejected,) = rejections(tmp_path)
    assert reason in rejected.reason
    assert (rejected.step, rejected.session, rejected.given_up) == (7, "uid_3", False)
    assert ask(tmp_path, 2, later := Engine(Exception("not asked"))) == SOUND and later.asked == 0


class Odd(Server):
    """What it answers first is `said`; then it is in order."""

    def __init__(self, said: Any) -> None:
        super().__init__()
        self.said = said

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.asked:
            return await super().answer(request)
        self.asked.append({})
        body = await request.json()
        said = json.dumps(self.said).encode()
        return web.Response(body=b"data: " + said + b"\n\n" if body.get("stream") else said)


class Strict(Tokenizer):
    """Fails as SkyRL's local one does."""

    def batch_decode(self, sequences: list[Any]) -> list[str]:
        for tokens in sequences:
            if min(tokens) < 0:
                raise OverflowError("can't convert negative int to unsigned")
        return super().batch_decode(sequences)


def ask_server(run_dir: Path, server: Server, continuation: bool, heard: list[Generation] | None = None) -> Any:
    """`heard` gets what would be journaled, instead of the rollout journal."""
    journal = Journal(run_dir, "driver", 1)

    async def work(client: RemoteInferenceClient) -> Any:
        client.tokenizer = Strict()
        run: Any = SimpleNamespace(directory=run_dir, attempt=SimpleNamespace(attempt=1), journal=journal)
        rollouts = Rollouts(run, "engine", continuation=continuation, vocabulary=VOCABULARY)
        rollouts.synced(6, "weights")
        if heard is not None:
            rollouts._append = lambda key, piece: heard.append(piece)  # type: ignore[assignment, method-assign]
        patient = PatientClient.of(client, "", 0.0)
        seeded = SeededClient(patient, 1, rollouts)
        seeded.begin("train", 7)
        try:
            return await seeded.generate(REQUEST | {"sampling_params": {"max_tokens": 6, "logprobs": 0}}, "adapter")
        finally:
            await patient._get_generate_client().aclose()
            rollouts.close()

    try:
        return with_client(server, work)
    finally:
        journal.close()


@pytest.mark.parametrize("continuation", [False, True])
@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ({"choices": [{"finish_reason": "stop"}]}, "KeyError('token_ids')"),
        ({"choices": [7]}, "TypeError"),
        ({"choices": [{"token_ids": [-1], "logprobs": None, "finish_reason": "stop"}]}, "OverflowError"),
    ],
)
def test_an_answer_that_can_t_be_taken_apart_is_malformed(
    tmp_path: Path, said: Any, wrong: str, continuation: bool
) -> None:
    assert ask_server(tmp_path, Odd(said), continuation)["response_ids"] != []
    (rejected,) = rejections(tmp_path)
    assert wrong in rejected.reason


def test_one_that_is_no_json_is_malformed(tmp_path: Path) -> None:
    raised = json.JSONDecodeError("Expecting value", "", 0)
    assert ask(tmp_path, 1, Engine(raised, SOUND)) == SOUND
    (rejected,) = rejections(tmp_path)
    assert repr(raised) in rejected.reason


@pytest.mark.parametrize("bug", [IndexError("list index"), KeyError("x"), TypeError("x"), AttributeError("x")])
def test_a_bug_is_no_malformed_answer(tmp_path: Path, bug: Exception) -> None:
    engine = Engine(bug)
    with pytest.raises(type(bug)) as raised:
        ask(tmp_path, 1, engine)
    assert raised.value is bug and engine.asked == 1
    assert rejections(tmp_path) == []


def test_one_that_stays_malformed_ends_the_attempt(tmp_path: Path) -> None:
    engine = Engine(SOUND | {"response_ids": [[5, 999]]})
    with pytest.raises(
        WorkerLost, match=f"{ASKS} malformed answers .* 999 is no token of a vocabulary of 300"
    ) as caught:
        ask(tmp_path, 1, engine)
    assert engine.asked == ASKS
    assert isinstance(caught.value.__cause__, Malformed)
    assert [rejected.given_up for rejected in rejections(tmp_path)] == [False] * (ASKS - 1) + [True]
    assert ask(tmp_path, 2, later := Engine(SOUND)) == SOUND and later.asked == 1, "nothing of it was journaled"


def test_other_failures_are_not_an_answer_s(tmp_path: Path) -> None:
    for failed in (aiohttp.ClientConnectionError("gone"), ValueError("`model` is required"), WorkerLost("elsewhere")):
        engine = Engine(failed)
        with pytest.raises(type(failed)):
            ask(tmp_path, 1, engine)
        assert engine.asked == 1
    assert rejections(tmp_path) == []


@pytest.mark.parametrize(
    "journaled",
    [
        Generation([], [], "stop", ""),
        Generation([5, 999], [-1.0, -1.0], "stop", "text"),
        Generation([5], [math.nan], "stop", "text"),
        Generation([5], [-1.0, -1.0], "stop", "text"),
        Generation([5], None, "stop", "text"),
        Generation([5], [-1.0], "abort", "text"),
    ],
)
def test_what_was_journaled_malformed_is_generated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, journaled: Generation
) -> None:
    keys: list[str] = []
    monkeypatch.setattr(Rollouts, "_keep", lambda self, key, output: keys.append(key))
    ask(tmp_path, 1, Engine(SOUND))
    log = GenerationLog(tmp_path, 6, 1)
    log.append(keys[0], journaled)
    log.close()
    assert ask(tmp_path, 2, engine := Engine(SOUND)) == SOUND
    assert engine.asked == 1


def test_a_beginning_that_was_journaled_malformed_is_generated_again(tmp_path: Path) -> None:
    log = GenerationLog(tmp_path, 6, 1)
    log.append("sound", Generation([5], [-1.0], None, ""))
    log.append("malformed", Generation([999], [-1.0], None, ""))
    log.close()
    run: Any = SimpleNamespace(directory=tmp_path, attempt=SimpleNamespace(attempt=2))
    rollouts = Rollouts(run, "engine", continuation=True, vocabulary=VOCABULARY)
    rollouts.synced(6, "weights")
    request = REQUEST | {"sampling_params": REQUEST["sampling_params"] | {"seed": 1}}
    assert rollouts._beginning("sound", request).tokens == [5]
    assert rollouts._beginning("malformed", request).tokens == []
    rollouts.close()


def test_a_malformed_piece_is_heard_by_nobody(tmp_path: Path) -> None:
    """A server that is out of order for its first `ASKS` - 1 streams, after a token that was in order."""

    class Broken(Server):
        async def answer(self, request: web.Request) -> web.StreamResponse:
            if len(self.asked) >= ASKS - 1:
                return await super().answer(request)
            self.asked.append({})
            response = web.StreamResponse()
            await response.prepare(request)
            for token in (4, -3):
                logprobs = {"content": [{"logprob": -1.0}]}
                choice = {"token_ids": [token], "logprobs": logprobs, "finish_reason": None}
                await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            return response

    heard: list[Generation] = []
    answer = ask_server(tmp_path, Broken(), continuation=True, heard=heard)
    assert len(answer["response_ids"][0]) >= 1
    assert all(token >= 0 for piece in heard for token in piece.tokens)
    assert [rejected.reason for rejected in rejections(tmp_path)] == ["-3 is no token of a vocabulary of 300"] * 2


def test_an_answer_may_be_short_where_the_engine_has_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    asked: list[str] = []

    async def models(request: web.Request) -> web.Response:
        asked.append(request.path)
        if len(asked) == 1:
            raise web.HTTPServiceUnavailable
        return web.json_response({"data": [{"id": "base", "max_model_len": 4}, {"id": "a", "max_model_len": None}]})

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        plain = RemoteInferenceClient(proxy_url="http://nowhere", server_urls=[url], data_parallel_size=1)
        client = PatientClient.of(plain, "", 0.0)
        short = SOUND | {"stop_reasons": ["length"]}
        try:
            await require_full_length(client, SOUND, REQUEST)
            await require_full_length(client, short | {"response_ids": [[5, 6, 7]]}, REQUEST)
            await require_full_length(client, short, REQUEST | {"sampling_params": {}})
            assert asked == [], "only an answer that looks too short is a reason to ask"
            await require_full_length(client, short, REQUEST)
            with pytest.raises(Malformed, match="after 1 of 3 tokens, with room for 4"):
                await require_full_length(client, short | {"response_ids": [[5]]}, REQUEST)
            assert len(asked) == 3, "again after it was refused and the engine was seen to serve, and no more"
            await require_full_length(plain, short, REQUEST)
            assert len(asked) == 4
        finally:
            await client._get_generate_client().aclose()
            await plain._get_generate_client().aclose()
            await runner.cleanup()

    asyncio.run(main())


def test_how_many_tokens_a_model_can_sample(tmp_path: Path) -> None:
    for config, size in (({"vocab_size": 9}, 9), ({"text_config": {"vocab_size": 8}}, 8), ({}, None)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert vocabulary_of(tmp_path) == size
