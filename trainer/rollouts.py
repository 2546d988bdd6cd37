"""Answers of the engines that survive a failure: a step that starts again generates only what was not finished.

A request is journaled under everything that determines its answer, so one that is found is right, whatever happened in
between. SkyRL's own agent loop replays the environments: it asks again in the same order and is answered at once. An
environment that then says something else than before makes another prompt, hence another key: that turn and those
after it are generated, as they would have been without a journal.

Where engines allow it (`continuation`), tokens are journaled while they are drawn, and a request that was not finished
goes on after them.
"""

import logging
from collections import Counter
from functools import partial
from typing import Any

from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineOutput

from checkpointing.canonical import canonical_json, digest
from checkpointing.errors import StoreError
from checkpointing.events import GenerationRejected
from checkpointing.generations import Generation, GenerationLog, KnownGenerations, delete_generations
from trainer.answers import Malformed, ask_until_sound, require_full_length, require_sound, require_sound_tokens
from trainer.determinism import environment
from trainer.run import Run, package_versions
from trainer.streaming import can_go_on, stream

NOT_DETERMINING = ("session_ids", "cache_salt")
"""Parts of a request that say where it goes and what may be cached for it, and change nothing of the answer."""

_KEPT = {"responses", "response_ids", "stop_reasons", "response_logprobs"}

_log = logging.getLogger(__name__)


class Rollouts:
    """The generations of one attempt, and those that earlier ones have left.

    `engine`: see `engine_digest`. `continuation`: engines sample by position, and their prefill equals their decoding.
    `vocabulary`: tokens that the model can sample, where that is known.
    """

    def __init__(self, run: Run, engine: str, continuation: bool = False, vocabulary: int | None = None) -> None:
        self._run, self._engine, self._continuation, self._vocabulary = run, engine, continuation, vocabulary
        self._weights = ""
        self._known: KnownGenerations | None = None
        self._own: GenerationLog | None = None
        self._tokens: Counter[tuple[str, bool]] = Counter()

    def synced(self, step: int, weights: str) -> None:
        """The engines have the policy of after `step`, whose parameters have the digest `weights`."""
        self._weights = weights
        if self._known is None:
            self._known = KnownGenerations(self._run.directory, step)
            _log.info("%d generations of earlier attempts can be reused", len(self._known))
        self.close()
        try:
            self._own = GenerationLog(self._run.directory, step, self._run.attempt.attempt)
        except StoreError as error:
            _log.warning("generations of this step will not survive a failure: %s", error)

    async def answer(self, phase: str, step: int, request: Any, model: str | None, client: Any) -> Any:
        """What `client.generate` answers to `request`, which holds one prompt and its seed; as before where known.

        Raises:
            WorkerLost: what the engine answers is malformed (answers.py), however often it is asked.
        """
        key = self._key(request, model)
        output = self._finished(key, request)
        reused = len(output["response_ids"][0]) if output is not None else 0
        if output is None:
            begun = self._beginning(key, request)
            reused = len(begun.tokens)

            def rejected(reason: str, given_up: bool) -> None:
                (session,) = request["session_ids"]
                self._run.journal.append(
                    GenerationRejected(step=step, session=str(session), reason=reason, given_up=given_up)
                )

            output = await ask_until_sound(partial(self._ask, key, begun, request, model, client), rejected)
            self._keep(key, output)
        self._tokens[phase, True] += reused
        self._tokens[phase, False] += len(output["response_ids"][0]) - reused
        return output

    async def _ask(self, key: str, begun: Generation, request: Any, model: str | None, client: Any) -> Any:
        """What an engine answers. Raises Malformed."""
        if self._continuation and can_go_on(request):

            def hear(offset: int, tokens: list[int], logprobs: list[float] | None) -> None:
                require_sound_tokens(tokens, logprobs, request["sampling_params"], self._vocabulary, offset)
                self._append(key, Generation(tokens, logprobs, None, "", offset))

            output = await stream(client, request, model, begun.tokens, begun.logprobs, hear)
        else:
            output = await client.generate(request, model)
        require_sound(output, request, self._vocabulary)
        await require_full_length(client, output, request)
        return output

    def _finished(self, key: str, request: Any) -> Any:
        """The answer of an earlier attempt; None if there is none, or it is malformed."""
        known = self._known.get(key) if self._known else None
        if known is None:
            return None
        output = _output(known)
        try:
            require_sound(output, request, self._vocabulary)
        except Malformed as error:
            _log.warning("a generation of an earlier attempt is generated again: %s", error)
            return None
        return output

    def _beginning(self, key: str, request: Any) -> Generation:
        """What earlier attempts have of an unfinished answer; nothing where it can't go on, or is malformed."""
        begun = Generation([], None, None, "")
        if self._known is None or not self._continuation or not can_go_on(request):
            return begun
        found = self._known.beginning(key)
        try:
            if found.tokens:
                require_sound_tokens(found.tokens, found.logprobs, request["sampling_params"], self._vocabulary)
        except Malformed as error:
            _log.warning("the beginning of a generation is generated again: %s", error)
            return begun
        return found

    def take_tokens(self, phase: str) -> dict[str, int]:
        """Tokens generated and reused in `phase` ("train" or "eval") since this was last asked."""
        return {
            "tokens_generated": self._tokens.pop((phase, False), 0),
            "tokens_reused": self._tokens.pop((phase, True), 0),
        }

    def discard(self) -> None:
        """What was generated is not to be trusted, by this attempt or any later one. Raises StoreError."""
        self.close()
        delete_generations(self._run.directory)

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None

    def _key(self, request: Any, model: str | None) -> str:
        asked = {name: value for name, value in request.items() if name not in NOT_DETERMINING}
        return digest(
            canonical_json({"weights": self._weights, "engine": self._engine, "model": model, "request": asked})
        )

    def _keep(self, key: str, output: Any) -> None:
        """Before anyone else sees it: SkyRL's agent loop appends to the lists that it gets."""
        generation = _generation(output)
        if generation is not None:
            self._append(key, generation)

    def _append(self, key: str, generation: Generation) -> None:
        if self._own is None:
            return
        try:
            self._own.append(key, generation)
        except StoreError as error:
            _log.warning("further generations of this step will not survive a failure: %s", error)
            self.close()


def engine_digest(run: Run, device: str, engines: dict[str, Any]) -> str:
    """Digest of what determines answers beside weights and request, and is the same for a whole attempt.

    That is the base model, tokenizer and configuration, package versions, environment, and how the harness starts its
    engines, if it does. Hardware is not part of it: on another GPU an old answer is still the one that the
    uninterrupted run had.
    """
    parts = {"identity": run.identity, "environment": environment(device), "engines": engines}
    return digest(canonical_json(parts | {"versions": package_versions()}))


def _generation(output: Any) -> Generation | None:
    """None if it can't be given back as it is, because there are arrays beside it."""
    if any(value is not None for name, value in output.items() if name not in _KEPT):
        return None
    (tokens,), (text,), (reason,) = output["response_ids"], output["responses"], output["stop_reasons"]
    logprobs = output["response_logprobs"]
    return Generation(tokens, logprobs and logprobs[0], reason, text)


def _output(generation: Generation) -> Any:
    return InferenceEngineOutput(
        responses=[generation.text],
        stop_reasons=[generation.stop_reason],
        response_ids=[generation.tokens],
        response_logprobs=None if generation.logprobs is None else [generation.logprobs],
        rollout_expert_indices=None,
        rollout_sample_support=None,
    )
