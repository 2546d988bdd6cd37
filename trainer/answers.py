"""Whether what an engine answered can be an answer to what it was asked. One that can't is asked for again, and never
seen, trained on or journaled."""

import json
import math
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_fixed

from checkpointing.errors import WorkerLost

ENDINGS = ("stop", "length", "repetition")
"""vLLM's other reasons (abort, error) say when something happened, not what was asked."""

ASKS = 3
WAIT = wait_fixed(1)
"""Seconds between two."""

_ANY_VOCABULARY = 2**31
"""Token ids are journaled as int32."""

_ABOVE_ZERO = 1e-3
"""A log-probability that is rounded may lie this far above 0."""

_LIMIT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60)
"""Of asking for something small."""


class Malformed(Exception):
    """An answer, or a piece of one, that no engine in order gives; says what is wrong with it."""


_NOT_UNDERSTOOD = (LookupError, TypeError, AttributeError, OverflowError)
"""What code that takes an answer apart makes of one that lacks parts. From elsewhere they are a bug."""

_TAKE_APART = ("skyrl.backends.skyrl_train.inference_servers.", "trainer.answers", "trainer.streaming")


def require_sound(answer: Any, request: Any, vocabulary: int | None) -> None:
    """Check a whole answer, SkyRL's InferenceEngineOutput, to `request`, an InferenceEngineInput of one prompt.

    Raises Malformed.
    """
    params = request["sampling_params"]
    scored = answer["response_logprobs"]
    for name in ("response_ids", "stop_reasons", "responses"):
        _require(len(answer[name]) == 1, f"{len(answer[name])} {name} to one prompt")
    _require(scored is None or len(scored) == 1, "log-probabilities of more or less than one response")
    (tokens,), (reason,) = answer["response_ids"], answer["stop_reasons"]
    require_sound_tokens(tokens, scored and scored[0], params, vocabulary)
    _require(len(tokens) > 0, "no tokens")
    _require(isinstance(answer["responses"][0], str), "no text")
    _require(reason in ENDINGS, f"it ended for {reason!r}")


def require_sound_tokens(
    tokens: list[int],
    logprobs: list[float] | None,
    params: dict[str, Any],
    vocabulary: int | None,
    offset: int = 0,
) -> None:
    """Check consecutive tokens of an answer, `offset` after its first, to a request with the sampling `params`.

    Raises Malformed.
    """
    limit = params.get("max_tokens")
    count = offset + len(tokens)
    _require(limit is None or count <= limit, f"{count} tokens where at most {limit} were asked for")
    size = vocabulary or _ANY_VOCABULARY
    for token in tokens:
        _require(type(token) is int and 0 <= token < size, f"{token!r} is no token of a vocabulary of {size}")
    if logprobs is None:
        _require(params.get("logprobs") is None, "no log-probabilities")
        return
    _require(len(logprobs) == len(tokens), f"{len(logprobs)} log-probabilities of {len(tokens)} tokens")
    for value in logprobs:
        sound = isinstance(value, float | int) and math.isfinite(value) and value <= _ABOVE_ZERO
        _require(sound, f"{value!r} is no log-probability")


async def require_full_length(client: Any, answer: Any, request: Any) -> None:
    """An answer that ended for its length is as long as was asked for, or as there was room for in the engine.

    Raises Malformed.
    """
    (tokens,), (prompt,) = answer["response_ids"], request["prompt_token_ids"]
    limit = request["sampling_params"].get("max_tokens")
    if answer["stop_reasons"] != ["length"] or limit is None or len(tokens) == limit:
        return
    room = await _context_length(client)
    full = len(prompt) + len(tokens) >= room
    _require(full, f"it ended for its length after {len(tokens)} of {limit} tokens, with room for {room}")


async def ask_until_sound(ask: Callable[[], Awaitable[Any]], rejected: Callable[[str, bool], None]) -> Any:
    """What `ask` returns. If it raises Malformed, or what taking an answer apart raises instead, it is called again.

    Args:
        rejected: told each time what was wrong, and whether that was the last time.

    Raises:
        WorkerLost: malformed `ASKS` times in a row.
    """

    def tell(state: RetryCallState) -> None:
        rejected(_wrong(state), state.attempt_number == ASKS)

    def give_up(state: RetryCallState) -> None:
        said = f"an engine gave {ASKS} malformed answers to one request, the last: {_wrong(state)}"
        raise WorkerLost(said) from _error(state)

    again = AsyncRetrying(
        stop=stop_after_attempt(ASKS),
        wait=WAIT,
        retry=retry_if_exception(_is_malformed),
        after=tell,
        retry_error_callback=give_up,
    )
    return await again(ask)


def vocabulary_of(model: Path) -> int | None:
    """Tokens that the model in folder `model` can sample, those that only pad its matrices included."""
    config = json.loads((model / "config.json").read_text())
    size: int | None = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return size


def _require(held: bool, otherwise: str) -> None:
    if not held:
        raise Malformed(otherwise)


def _is_malformed(error: BaseException) -> bool:
    """Whether `error` came of an answer that can't be one. Given no tokens a tokenizer fails in its own code."""
    if not isinstance(error, _NOT_UNDERSTOOD):
        return isinstance(error, Malformed | json.JSONDecodeError)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = str(frames[-1].f_globals.get("__name__"))
    return raised_in.startswith(_TAKE_APART) or any(frame.f_code.co_name == "detokenize" for frame in frames)


def _error(state: RetryCallState) -> BaseException | None:
    assert state.outcome is not None
    return state.outcome.exception()


def _wrong(state: RetryCallState) -> str:
    error = _error(state)
    return str(error) if isinstance(error, Malformed) else f"it could not be understood: {error!r}"


async def _context_length(client: Any) -> int:
    """Tokens of prompt and answer that fit into an engine. Asked only once, about an answer that looks too short."""

    async def ask() -> Any:
        http = await client._get_session()
        url = f"{client.server_urls[0]}/v1/models"
        async with http.get(url, raise_for_status=True, timeout=_LIMIT) as response:
            return (await response.json())["data"]

    if (known := vars(client).get("context_length")) is not None:
        return int(known)
    models = await (client.again(ask) if hasattr(client, "again") else ask())
    client.context_length = max(model["max_model_len"] or 0 for model in models)
    return int(client.context_length)
