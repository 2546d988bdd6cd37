"""SkyRL's generator and inference client, with two things added: every request carries its own derived seed, and what
an earlier attempt was answered is not asked again (see rollouts.py)."""

from collections import Counter
from typing import Any

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.train.generators.base import GeneratorInput, GeneratorOutput

from checkpointing.errors import ConfigError
from checkpointing.phases import reached
from trainer.determinism import request_seed
from trainer.rollouts import Rollouts


class SeededClient:
    """An inference client whose `generate` adds the seed and goes by `rollouts`; all else is the wrapped client's.

    `begin` names the batch; a request's turn is how often its session has asked since then.
    """

    def __init__(self, client: RemoteInferenceClient, run_seed: int, rollouts: Rollouts) -> None:
        self._client = client
        self._rollouts = rollouts
        self._run_seed = run_seed
        self._batch = ("train", 0)
        self._turns: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def begin(self, phase: str, step: int) -> None:
        self._batch = (phase, step)
        self._turns.clear()

    async def generate(self, input_batch: Any, model: str | None = None) -> Any:
        """One request of one trajectory, as SkyRL's agent loop sends it: one prompt, one session `uid_repetition`."""
        (session,) = input_batch["session_ids"]
        uid, _, repetition = session.rpartition("_")
        phase, step = self._batch
        seed = request_seed(self._run_seed, phase, step, uid, int(repetition), self._turns[session])
        self._turns[session] += 1
        params = dict(input_batch.get("sampling_params") or {}, seed=seed)
        request = dict(input_batch, sampling_params=params)
        output = await self._rollouts.answer(phase, step, request, model, self._client)
        reached("generate.request", step=step, phase=phase)
        return output


def seed_requests(generator: Any, run_seed: int, rollouts: Rollouts) -> None:
    """Make `generator` (SkyRL's text or image generator) send a derived seed with every request that it has to send.

    Raises:
        ConfigError: `generator.batched=true`; it sends a whole batch as one call, which has no request to seed.
    """
    if generator.generator_cfg.batched:
        raise ConfigError(
            "generator.batched=true sends no trajectory ids, so requests can't be seeded: set it to false"
        )
    client = SeededClient(generator.inference_engine_client, run_seed, rollouts)
    generator.inference_engine_client = client
    plain_generate = generator.generate

    async def generate(input_batch: GeneratorInput, *args: Any, **kwargs: Any) -> GeneratorOutput:
        batch = input_batch["batch_metadata"]
        client.begin(batch.training_phase, batch.global_step)
        output: GeneratorOutput = await plain_generate(input_batch, *args, **kwargs)
        return output

    generator.generate = generate
