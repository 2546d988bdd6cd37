import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpointing.errors import ConfigError
from trainer.maze.base_model import DOUBT, demonstration, encode, make_tokenizer, unsure_loss
from trainer.maze.data import draw_mazes
from trainer.maze.env import MazeEnv
from trainer.maze.maze import Maze
from trainer.maze.render import Message, as_text, prompt
from trainer.maze.spec import MazeSpec
from trainer.maze.task import TaskPaths, build_task

TINY = MazeSpec(train=30, held_out=200, hidden_size=64, layers=1, warm_up_steps=8, warm_up_batch=4)
TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TaskPaths:
    return build_task(tmp_path_factory.mktemp("task"), TINY)


def contents(folder: Path) -> dict[str, bytes]:
    """Of every file that the task consists of; the stamp holds times too."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "task.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def conversation_ids(messages: list[Message], *, ask: bool = False) -> list[int]:
    ids = TOKENIZER.apply_chat_template(messages, add_generation_prompt=ask, tokenize=True, return_dict=False)
    return list(ids)


# -- data


def test_training_and_held_out_mazes_share_no_maze() -> None:
    train, held_out = draw_mazes(MazeSpec(train=1000))
    assert len({maze.digest() for maze in train + held_out}) == 1000 + 256


def test_held_out_mazes_stay_the_same_when_more_are_trained_on() -> None:
    assert draw_mazes(TINY)[1] == draw_mazes(TINY.model_copy(update={"train": 60}))[1]


def test_another_seed_gives_other_mazes() -> None:
    assert not set(draw_mazes(TINY)[1]) & set(draw_mazes(TINY.model_copy(update={"seed": 1}))[1][:5])


def test_too_few_mazes_of_this_size_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"different mazes of size 2, need 230 .* take a larger size"):
        build_task(tmp_path / "task", TINY.model_copy(update={"size": 2}))
    assert not (tmp_path / "task").exists()


def test_rows_have_the_columns_that_skyrl_and_the_environment_read(task: TaskPaths) -> None:
    train, held_out = draw_mazes(TINY)
    for path, mazes in ((task.train, train), (task.held_out, held_out)):
        rows = parquet.read_table(path).to_pylist()
        assert [Maze.from_json(row["reward_spec"]["ground_truth"]) for row in rows] == mazes
        assert [row["prompt"] for row in rows] == [[{"role": "user", "content": as_text(maze)}] for maze in mazes]
        assert [row["extra_info"]["index"] for row in rows] == list(range(len(mazes)))
        assert {row["env_class"] for row in rows} == {"maze"}
        for row, maze in zip(rows, mazes, strict=True):
            assert MazeEnv(extras=row).step(maze.shortest_path())["reward"] == 1.0


# -- tokenizer


@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids) == text
    assert max(ids, default=0) < len(TOKENIZER)


@pytest.mark.parametrize(
    "text", ["user", "the assistant's user ", "<|im_end|>", "<|im_start|>user\nR<|im_end|>\n", " R  D "]
)
def test_special_tokens_survive_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_a_cell_is_a_token_and_the_prompt_is_short() -> None:
    for maze in draw_mazes(TINY)[1]:
        ids = conversation_ids(prompt(maze), ask=True)
        picture = as_text(maze)
        assert TOKENIZER.decode(ids) == f"<|im_start|>user\n{picture}<|im_end|>\n<|im_start|>assistant\n"
        assert len(ids) == len(picture) + 8


@pytest.mark.parametrize("max_turns", [1, 20])
def test_a_demonstration_is_what_skyrl_would_have_recorded(max_turns: int) -> None:
    """Token for token: SkyRL never tokenizes a conversation anew, it appends answers and observations as they come."""
    base = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "I am a user."}]
    base_length = len(conversation_ids(base)) - 1  # what follows the last end of turn belongs to the observation
    for maze in draw_mazes(TINY)[0]:
        env = MazeEnv(extras={"reward_spec": {"ground_truth": maze.to_json()}, "max_turns": max_turns})
        path = maze.shortest_path()
        ids, answers = conversation_ids(prompt(maze), ask=True), []
        for answer in [path] if max_turns == 1 else list(path):
            answers += [*range(len(ids), len(ids) + len(answer) + 1)]
            ids += TOKENIZER.encode(answer + "<|im_end|>", add_special_tokens=False)
            output = env.step(answer)
            if not output["done"]:
                ids += conversation_ids([*base, *output["observations"]], ask=True)[base_length:]
        assert env.get_metrics()["success"] == 1.0
        tokens, labels = encode([maze], max_turns, TOKENIZER)
        assert tokens[0].tolist()[:-1] == ids  # the template ends each message with a new line
        assert (labels[0] != -100).nonzero().flatten().tolist() == answers
        assert labels[0][answers].tolist() == [ids[position] for position in answers]


def test_a_demonstration_has_no_more_turns_than_the_environment_grants() -> None:
    maze = max(draw_mazes(TINY)[0], key=lambda maze: len(maze.shortest_path()))
    roles = [message["role"] for message in demonstration(maze, 3)]
    assert roles == ["user", "assistant", "user", "assistant", "user", "assistant"]


# -- the whole task


def test_a_second_build_changes_nothing(task: TaskPaths) -> None:
    folder = task.train.parent
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert build_task(folder, TINY) == task
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_equal_specs_give_equal_bytes_and_leave_torch_as_it_was(task: TaskPaths, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(7)
    state = torch.get_rng_state()
    torch.set_num_threads(threads + 1)
    try:
        build_task(tmp_path, TINY)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert contents(tmp_path) == contents(task.train.parent)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["train.parquet", "val.parquet", "model/model.safetensors", "task.json"])
@pytest.mark.parametrize("damage", ["lost", "torn"])
def test_what_was_lost_or_changed_is_built_anew(task: TaskPaths, name: str, damage: str) -> None:
    folder, whole = task.train.parent, contents(task.train.parent)
    if damage == "lost":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes((folder / name).read_bytes()[:-9])
    build_task(folder, TINY)
    assert contents(folder) == whole
    assert json.loads((folder / "task.json").read_text())["spec"] == TINY.model_dump()


def test_another_spec_is_built_anew(tmp_path: Path) -> None:
    build_task(tmp_path, TINY)
    before = contents(tmp_path)
    build_task(tmp_path, TINY.model_copy(update={"seed": 1}))
    after = contents(tmp_path)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"train.parquet", "val.parquet", "model/model.safetensors"}


def test_other_code_builds_anew(task: TaskPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(task.train.parent, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr("trainer.maze.task._code_digest", lambda: "other code")
    build_task(tmp_path, TINY)
    assert json.loads((tmp_path / "task.json").read_text())["code"] == "other code"


def test_the_model_loads_as_any_other_and_the_warm_up_changed_it(task: TaskPaths) -> None:
    model = AutoModelForCausalLM.from_pretrained(task.model)
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    assert model.config.architectures == ["Qwen3ForCausalLM"] and model.config.tie_word_embeddings
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert task.warm_up["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert task.warm_up["last_loss"] < task.warm_up["first_loss"]


def test_the_moves_share_the_doubt_of_each_label() -> None:
    logits, labels = torch.randn(2, 4, 6), torch.tensor([[0, 5, 3, -100], [0, -100, 2, 1]])
    moves = torch.tensor([1, 2, 3, 4])
    wanted = (1 - DOUBT) * torch.nn.functional.one_hot(labels[:, 1:].clamp(min=0), 6).double()
    wanted[..., moves] += DOUBT / len(moves)
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).double(), wanted.flatten(0, 1), reduction="none"
    )
    expected = losses[(labels[:, 1:] != -100).flatten()].mean()
    assert unsure_loss(logits, labels, moves).item() == pytest.approx(expected.item(), rel=1e-5)
