"""A step that starts again asks engines only for what was not finished, and is answered exactly as before."""

import asyncio
import copy
import errno
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaos.verdict import compare
from checkpointing import generations
from checkpointing.errors import EngineMismatch, StoreError
from checkpointing.events import Evaluated, StepDone
from checkpointing.generations import delete_generations
from checkpointing.settings import Checkpoints
from trainer import saving, steps
from trainer.generation import SeededClient, seed_requests
from trainer.rollouts import Rollouts, engine_digest
from trainer.saving import Saver, _Save

from . import test_verdict as verdicts
from .checkpoint_samples import Crash

TRAJECTORIES, TURNS = 10, 2
PARAMS = {"temperature": 1.0, "max_tokens": 8, "logprobs": 0}


class Engine:
    """Answers by the seed and the prompt, and dies when it has answered `lives` requests."""

    weight_version = 7

    def __init__(self, lives: int | None = None) -> None:
        self.lives = lives
        self.asked: list[Any] = []

    async def generate(self, input_batch: Any, model: str | None = None) -> Any:
        await asyncio.sleep(0)  # others go on meanwhile
        if self.lives is not None and len(self.asked) >= self.lives:
            raise Crash
        self.asked.append(copy.deepcopy(input_batch))
        (prompt,) = input_batch["prompt_token_ids"]
        drawn = hashlib.sha256(f"{input_batch['sampling_params']['seed']}/{prompt}".encode()).digest()
        return {
            "responses": [drawn.hex()],
            "stop_reasons": ["stop"],
            "response_ids": [[int(byte) for byte in drawn[:6]]],
            "response_logprobs": [[-byte / 7 for byte in drawn[:5]] + [-1e-300]],
            "rollout_expert_indices": None,
            "rollout_sample_support": None,
        }


def attempt(run_dir: Path, number: int, weights: str = "w0", engine: str = "e") -> Rollouts:
    rollouts = Rollouts(SimpleNamespace(directory=run_dir, attempt=SimpleNamespace(attempt=number)), engine)  # type: ignore[arg-type]
    rollouts.synced(0, weights)
    return rollouts


def client(rollouts: Rollouts, engine: Engine, phase: str = "train", run_seed: int = 1) -> SeededClient:
    seeded = SeededClient(engine, run_seed, rollouts)
    seeded.begin(phase, 1)
    return seeded


async def agent_loop(seeded: SeededClient, number: int, finished: dict[int, list[Any]]) -> None:
    """As SkyRL's: the next prompt holds the answer so far, and the lists that were handed out are appended to."""
    prompt, said = [number, 100], []
    for turn in range(TURNS):
        request = {"prompt_token_ids": [prompt], "session_ids": [f"uid{number}_0"], "sampling_params": dict(PARAMS)}
        output = await seeded.generate(request, model="adapter")
        said.append(copy.deepcopy(output))
        (tokens,) = output["response_ids"]
        tokens.append(2)
        if output["response_logprobs"] != [None]:
            output["response_logprobs"][0].append(0.0)
        prompt = prompt + tokens + [200 + turn]
    finished[number] = said


def step(seeded: SeededClient, count: int = TRAJECTORIES) -> dict[int, list[Any]]:
    """The trajectories of a step that were finished; all of them unless the engine died."""
    finished: dict[int, list[Any]] = {}

    async def together() -> None:
        await asyncio.gather(*(agent_loop(seeded, number, finished) for number in range(count)))

    try:
        asyncio.run(together())
    except Crash:
        assert len(finished) < count
    return finished


@pytest.mark.parametrize("phase", ["train", "eval"])
def test_killed_at_four_fifths_only_the_rest_is_generated(tmp_path: Path, phase: str) -> None:
    expected = step(client(attempt(tmp_path / "whole", 1), Engine(), phase))
    lives = TRAJECTORIES * TURNS * 4 // 5
    first = attempt(tmp_path / "run", 1)
    step(client(first, Engine(lives), phase))  # and is not closed: it was killed
    second, engine = attempt(tmp_path / "run", 2), Engine()
    assert step(client(second, engine, phase)) == expected
    assert len(engine.asked) == TRAJECTORIES * TURNS - lives
    assert first.take_tokens(phase) == {"tokens_generated": 6 * lives, "tokens_reused": 0}
    assert second.take_tokens(phase) == {
        "tokens_generated": 6 * (TRAJECTORIES * TURNS - lives),
        "tokens_reused": 6 * lives,
    }
    assert second.take_tokens(phase) == second.take_tokens("other") == {"tokens_generated": 0, "tokens_reused": 0}
    assert step(client(attempt(tmp_path / "run", 3), engine := Engine(), phase)) == expected and engine.asked == []


def test_two_attempts_that_died_add_up(tmp_path: Path) -> None:
    expected = step(client(attempt(tmp_path / "whole", 1), Engine()))
    for number, lives in ((1, 5), (2, 6)):
        step(client(attempt(tmp_path / "run", number), Engine(lives)))
    engine = Engine()
    assert step(client(attempt(tmp_path / "run", 3), engine)) == expected
    assert len(engine.asked) == TRAJECTORIES * TURNS - 11


def test_what_comes_back_is_what_the_client_returned(tmp_path: Path) -> None:
    (before,) = step(client(attempt(tmp_path, 1), Engine()), 1).values()
    (after,) = step(client(attempt(tmp_path, 2), Engine(0)), 1).values()
    assert after == before and [list(output) for output in after] == [list(output) for output in before]
    for old, new in zip(before, after, strict=True):
        assert [value.hex() for value in new["response_logprobs"][0]] == [
            value.hex() for value in old["response_logprobs"][0]
        ]


def test_a_request_without_log_probabilities(tmp_path: Path) -> None:
    class Silent(Engine):
        async def generate(self, input_batch: Any, model: str | None = None) -> Any:
            return await super().generate(input_batch, model) | {"response_logprobs": None}

    request = {"prompt_token_ids": [[1]], "session_ids": ["a_0"], "sampling_params": None}
    before = asyncio.run(client(attempt(tmp_path, 1), Silent()).generate(dict(request)))
    after = asyncio.run(client(attempt(tmp_path, 2), Engine(0)).generate(dict(request)))
    assert after == before and after["response_logprobs"] is None


@pytest.mark.parametrize("changed", [{"weights": "w1"}, {"engine": "another version"}])
def test_other_weights_or_engines_reuse_nothing(tmp_path: Path, changed: dict[str, str]) -> None:
    step(client(attempt(tmp_path, 1), Engine()))
    engine = Engine()
    step(client(attempt(tmp_path, 2, **changed), engine))
    assert len(engine.asked) == TRAJECTORIES * TURNS


def test_whatever_determines_the_answer_is_in_the_key_and_nothing_else(tmp_path: Path) -> None:
    request = {"prompt_token_ids": [[1, 2]], "session_ids": ["a_0"], "sampling_params": PARAMS, "cache_salt": "1"}
    image = {"mm_hashes": {"image": ["h"]}, "mm_placeholders": {}, "kwargs_data": {"image": ["pixels"]}}

    def asked(number: int, model: str = "adapter", run_seed: int = 1, **changes: Any) -> int:
        engine = Engine()
        seeded = client(attempt(tmp_path, number), engine, run_seed=run_seed)
        asyncio.run(seeded.generate(request | changes, model))
        return len(engine.asked)

    assert asked(1) == 1 and asked(2) == 0
    assert asked(3, cache_salt="9") == 0, "how often weights were synced is no part of the answer"
    assert asked(4, run_seed=2) == 1
    assert asked(5, model="other adapter") == 1
    assert asked(6, prompt_token_ids=[[1, 3]]) == 1
    assert asked(7, sampling_params=PARAMS | {"temperature": 0.5}) == 1
    assert asked(8, return_sample_support=True) == 1
    assert asked(9, mm_features=[image]) == 1 and asked(10, mm_features=[copy.deepcopy(image)]) == 0
    assert asked(11, mm_features=[image | {"kwargs_data": {"image": ["other pixels"]}}]) == 1


def test_an_environment_that_says_something_else_makes_a_miss(tmp_path: Path) -> None:
    first = client(attempt(tmp_path, 1), Engine())
    step(first)
    engine = Engine()
    seeded = client(attempt(tmp_path, 2), engine)
    request = {"prompt_token_ids": [[0, 100]], "session_ids": ["uid0_0"], "sampling_params": dict(PARAMS)}
    asyncio.run(seeded.generate(dict(request), "adapter"))
    assert engine.asked == []
    asyncio.run(seeded.generate(request | {"prompt_token_ids": [[0, 100, 55]]}, "adapter"))
    assert len(engine.asked) == 1


@pytest.mark.parametrize(
    "answer",
    [
        {"rollout_expert_indices": [object()]},
        {"something_new": 1},
    ],
)
def test_what_could_not_be_given_back_as_it_is_is_not_kept(tmp_path: Path, answer: dict[str, Any]) -> None:
    class Odd(Engine):
        async def generate(self, input_batch: Any, model: str | None = None) -> Any:
            return await super().generate(input_batch, model) | answer

    step(client(attempt(tmp_path, 1), Odd()), 1)
    engine = Engine()
    step(client(attempt(tmp_path, 2), engine), 1)
    assert len(engine.asked) == TURNS


def test_before_the_first_sync_nothing_is_kept(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(directory=tmp_path, attempt=SimpleNamespace(attempt=1))
    step(client(Rollouts(run, "e"), Engine()), 1)
    assert not (tmp_path / "rollouts").exists()


def test_storage_that_refuses_stops_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def full(*_: Any) -> int:
        tried.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    rollouts = attempt(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(generations, "write_all", full)
        assert len(step(client(rollouts, Engine()))) == TRAJECTORIES
    assert [record.message for record in caplog.records if "will not survive" in record.message] != []
    assert len(tried) == 1, "half a line may be there: nothing may follow it"
    rollouts.synced(1, "w1")
    step(client(rollouts, Engine()))
    engine = Engine()
    step(client(attempt(tmp_path, 2, "w1"), engine))
    assert engine.asked == [], "the next step is journaled again"


def test_every_step_has_its_file_and_a_weight_sync_starts_the_next(tmp_path: Path) -> None:
    rollouts = attempt(tmp_path, 3)
    rollouts.synced(1, "w1")
    rollouts.close()
    names = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert names == ["0000000000-000003.log", "0000000001-000003.log"]


def test_the_generator_is_given_a_client_that_reuses(tmp_path: Path) -> None:
    async def generate(_batch: Any) -> dict[str, Any]:
        await agent_loop(generator.inference_engine_client, 0, finished)
        return {}

    for number, asked in ((1, TURNS), (2, 0)):
        finished: dict[int, list[Any]] = {}
        engine = Engine()
        generator = SimpleNamespace(
            generator_cfg=SimpleNamespace(batched=False), inference_engine_client=engine, generate=generate
        )
        seed_requests(generator, 1, attempt(tmp_path, number))
        batch = {"batch_metadata": SimpleNamespace(training_phase="train", global_step=1)}
        asyncio.run(generator.generate(batch))
        assert len(engine.asked) == asked
        assert generator.inference_engine_client.weight_version == 7


def test_engines_are_told_apart_by_what_determines_their_answers() -> None:
    run: Any = SimpleNamespace(identity={"config": "c", "policy model": "m"})
    same = engine_digest(run, "cpu", {"max-model-len": 256})
    assert same == engine_digest(run, "cpu", {"max-model-len": 256})
    others = [
        engine_digest(run, "gpu", {"max-model-len": 256}),
        engine_digest(run, "cpu", {"max-model-len": 512}),
        engine_digest(SimpleNamespace(identity={"config": "c", "policy model": "n"}), "cpu", {"max-model-len": 256}),  # type: ignore[arg-type]
    ]
    assert len({same, *others}) == 4


@pytest.fixture
def saver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saver:
    """Saves a State that is empty, without Ray."""
    settings = Checkpoints()
    run: Any = SimpleNamespace(
        directory=tmp_path, settings=settings, tiers=settings.open(tmp_path), resumed_step=0, topology={}, identity={},
        attempt=SimpleNamespace(attempt=1), parent=None, parent_blobs=frozenset(), signer=None,
        journal=SimpleNamespace(append=lambda event: None),
    )  # fmt: skip
    monkeypatch.setattr(saving, "ray", SimpleNamespace(get=list, wait=lambda calls, num_returns: None))
    monkeypatch.setattr(saving, "write_staged", lambda *_: {})
    return Saver(SimpleNamespace(keepers={}), run)


def test_generations_go_only_when_their_step_is_committed(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = attempt(tmp_path, 1)
    for done in (1, 2, 3):
        rollouts.synced(done, f"w{done}")
    rollouts.close()

    def left() -> list[int]:
        return sorted(int(path.name[:10]) for path in (tmp_path / "rollouts").iterdir())

    save: Any = _Save(step=2, ranks=[], driver=None, expected={}, started=0.0, stopped_seconds=0.0)  # type: ignore[arg-type]

    def refuse(*_: Any) -> Any:
        raise StoreError("no space")

    monkeypatch.setattr(saving, "commit", refuse)
    with pytest.raises(StoreError):
        saver._write(save)
    assert left() == [0, 1, 2, 3], "not committed: a resume would still want them"

    def committed(*_: Any) -> Any:
        assert left() == [0, 1, 2, 3], "not before the commit exists"
        return SimpleNamespace(key="commits/0000000002-000001.json")

    monkeypatch.setattr(saving, "commit", committed)
    saver._write(save)
    assert left() == [2, 3], "what was made with the committed weights belongs to the next step"


def test_answers_of_an_engine_with_other_weights_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = attempt(tmp_path, 1)
    step(client(rollouts, Engine()))
    trainer = SimpleNamespace(
        global_step=1,
        saver=SimpleNamespace(report=lambda: None),
        rollouts=rollouts,
        all_metrics={"policy/rollout_train_logprobs_abs_diff_mean": 0.2},
    )
    monkeypatch.setattr(steps, "digest_state", lambda _trainer: {})
    monkeypatch.setattr(steps, "require_finite", lambda *_: None)
    ended: Any = SimpleNamespace(batch={}, metrics={})
    control: Any = None
    with pytest.raises(EngineMismatch):
        steps.StepJournal(SimpleNamespace()).on_step_end(trainer, ended, control)  # type: ignore[arg-type]
    engine = Engine()
    step(client(attempt(tmp_path, 2), engine))
    assert len(engine.asked) == TRAJECTORIES * TURNS


def test_how_much_was_reused_is_no_difference_between_runs() -> None:
    records = verdicts.resumed()
    reused = verdicts.replace(
        records,
        lambda record: (
            record.event.model_copy(update={"tokens_generated": 3, "tokens_reused": 9})
            if isinstance(record.event, StepDone)
            else record.event
        ),
    )
    assert compare(verdicts.journal("whole"), reused) == compare(verdicts.journal("whole"), records)
    assert compare(verdicts.journal("whole"), reused).outcome == "identical"


def test_events_of_older_journals_are_read() -> None:
    for event in (verdicts.step_done(1), Evaluated(step=1, metrics={})):
        old = event.model_dump()
        assert old.pop("tokens_generated") == old.pop("tokens_reused") == 0
        assert type(event).model_validate(old) == event


def test_nothing_is_left_of_a_run_that_is_complete(tmp_path: Path) -> None:
    attempt(tmp_path, 1).close()
    delete_generations(tmp_path)
    assert list((tmp_path / "rollouts").iterdir()) == []
