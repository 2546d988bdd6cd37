"""One request whose tokens are heard while they are drawn, and which can go on after tokens that were drawn before.

Needs engines that sample by position (sampling.py) and whose prefill equals their decoding (`harness doctor`): then
what follows a beginning is what would have followed it, bit for bit.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from typing import Any

import aiohttp
import orjson
from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineOutput
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient, raise_for_status

from trainer.client import PatientClient

BY_POSITION = {
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "logprobs", "seed", "stop_token_ids",
    "ignore_eos", "logit_bias", "skip_special_tokens", "include_stop_str_in_output",
}  # fmt: skip
"""Sampling parameters under which a token depends on those before it as context alone. Stop strings and penalties are
not among them: they look at what was generated, which in a request that goes on is partly prompt."""

Hear = Callable[[int, list[int], list[float] | None], None]
"""hear(offset, tokens, logprobs): these were drawn, and the request is not finished yet."""


def can_go_on(request: Any) -> bool:
    """Whether `request` (SkyRL's InferenceEngineInput of one prompt) could be continued from its first tokens."""
    params = request["sampling_params"]
    odd = {name for name, value in params.items() if name not in BY_POSITION and value not in (None, [])}
    beside = request.get("return_sample_support") or request.get("routed_experts_prompt_starts")
    return not odd and not beside and "seed" in params and params.get("max_tokens") is not None


async def stream(
    client: PatientClient,
    request: Any,
    model: str | None,
    tokens: list[int],
    logprobs: list[float] | None,
    hear: Hear,
) -> Any:
    """What `client.generate(request, model)` returns, given that it begins with `tokens`.

    Raises:
        WorkerLost, aiohttp.ClientError: as `PatientClient.again`.
    """
    params = request["sampling_params"]
    tokens = tokens[: params["max_tokens"] - 1]  # a request can't be sent for no token
    scores = list(logprobs or [])[: len(tokens)]
    generate, _ = client._get_semaphores()
    reason = None

    async def go_on() -> None:
        nonlocal tokens, scores, reason
        async with generate or nullcontext():
            async for choice in _choices(client, _body(client, request, model, tokens)):
                new = choice["token_ids"] or []
                new_scores = [item["logprob"] for item in (choice["logprobs"] or {}).get("content") or []]
                reason = choice["finish_reason"]
                if reason is None:
                    hear(len(tokens), new, new_scores if params.get("logprobs") is not None else None)
                tokens, scores = tokens + new, scores + new_scores
                if reason is not None:
                    return
        raise aiohttp.ServerDisconnectedError("the stream ended before the generation did")

    await client.again(go_on)
    (text,) = await client.detokenize([tokens])
    return InferenceEngineOutput(
        responses=[text],
        stop_reasons=[reason],
        response_ids=[tokens],
        response_logprobs=[scores or None] if params.get("logprobs") is not None else None,
        rollout_expert_indices=None,
        rollout_sample_support=None,
    )


def _body(client: RemoteInferenceClient, request: Any, model: str | None, tokens: list[int]) -> dict[str, Any]:
    (prompt,), params = request["prompt_token_ids"], request["sampling_params"]
    (session,) = request["session_ids"]
    changed = {
        "max_tokens": params["max_tokens"] - len(tokens),
        "min_tokens": max(0, (params.get("min_tokens") or 0) - len(tokens)),
        # Pieces cost: a failure may lose the last hundredth of each request.
        "stream_interval": max(1, params["max_tokens"] // 100),
    }
    body = {
        "sampling_params": params | changed,
        "model": client._resolve_model(model, "generate"),
        "token_ids": prompt + tokens,
        "stream": True,
    }
    if features := (request.get("mm_features") or [None])[0]:
        body["features"] = features
    if request.get("cache_salt") is not None:
        body["cache_salt"] = request["cache_salt"]
    return {"json": body, "headers": {"X-Session-ID": str(session)}}


async def _choices(client: RemoteInferenceClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The pieces of an answer as they come: server-sent events, each a line of JSON and an empty line."""
    http = await client._get_session()
    async with http.post(f"{client.proxy_url}/inference/v1/generate", **body) as response:
        if response.status >= 400:
            said = await response.read()
            raise_for_status(response, orjson.loads(said) if said[:1] == b"{" else None)
        left = b""
        async for piece in response.content.iter_any():
            *lines, left = (left + piece).split(b"\n")
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                event = orjson.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise aiohttp.ClientPayloadError(f"an engine failed in mid-answer: {event['error']}")
                for choice in event["choices"]:
                    yield choice
