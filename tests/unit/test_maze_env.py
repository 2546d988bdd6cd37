from collections.abc import Iterator
from typing import Any

import pytest
import skyrl_gym
from hypothesis import given
from hypothesis import strategies as st
from skyrl_gym.envs.registration import deregister
from skyrl_gym.metrics import aggregate_for_environment

from checkpointing.errors import ConfigError
from trainer.maze.maze import Maze, generate

MAZE = Maze(3, frozenset({(0, 1), (1, 1)}), (0, 0), (0, 2))  # "DDRRUU" is the only way
PATH = "DDRRUU"
MAZES = [MAZE, *(generate(4, f"env/{index}") for index in range(50))]


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    skyrl_gym.register(id="maze", entry_point="trainer.maze.env:MazeEnv")
    yield
    deregister("maze")


def make(maze: Maze, max_turns: int) -> Any:
    """The environment as SkyRL's generator makes it from a dataset row."""
    row = {
        "data_source": "maze",
        "reward_spec": {"method": "rule", "ground_truth": maze.to_json()},
        "extra_info": {"index": 0},
        "max_turns": max_turns,
    }
    return skyrl_gym.make("maze", env_config={}, extras=row)


def play(maze: Maze, max_turns: int, answers: list[str]) -> tuple[list[float], dict[str, float]]:
    """Rewards turn by turn until the trajectory is done, or the answers are, and its metrics."""
    env = make(maze, max_turns)
    rewards = []
    for answer in answers:
        output = env.step(answer)
        rewards.append(output["reward"])
        if output["done"]:
            assert output["observations"] == []
            break
        assert [message["role"] for message in output["observations"]] == ["user"]
    return rewards, env.get_metrics()


def test_single_turn_success() -> None:
    assert play(MAZE, 1, [PATH]) == ([1.0], {"success": 1.0, "progress": 1.0, "malformed": 0.0})


def test_single_turn_is_over_after_one_answer_however_good() -> None:
    for answer in (PATH, "D", "R", "what?"):
        assert make(MAZE, 1).step(answer)["done"]


def test_single_turn_progress_without_success() -> None:
    (reward,), metrics = play(MAZE, 1, ["DDR"])
    assert reward == 0.25
    assert metrics == {"success": 0.0, "progress": 0.5, "malformed": 0.0}


@pytest.mark.parametrize("max_turns", [1, 10])
@given(answer=st.text())
def test_malformed_answers_have_a_reward_and_no_exception(max_turns: int, answer: str) -> None:
    env = make(MAZE, max_turns)
    output = env.step(answer + "?")
    assert (output["reward"], output["done"]) == (0.0, True)
    assert env.get_metrics() == {"success": 0.0, "progress": 0.0, "malformed": 1.0}


def test_multi_turn_success_tells_the_possible_moves_in_between() -> None:
    env = make(MAZE, 10)
    observed = [env.step(move)["observations"] for move in PATH]
    assert observed[0] == [{"role": "user", "content": "UD"}]
    assert observed[-1] == []
    assert env.get_metrics()["success"] == 1.0


def test_multi_turn_takes_one_move_a_turn() -> None:
    rewards, metrics = play(MAZE, 10, ["D", "DR"])
    assert rewards[1] == 0.0
    assert metrics == {"success": 0.0, "progress": pytest.approx(1 / 6), "malformed": 1.0}


def test_turns_run_out() -> None:
    rewards, metrics = play(MAZE, 4, list(PATH))
    assert len(rewards) == 4
    assert metrics["success"] == 0.0


@given(st.sampled_from(MAZES), st.lists(st.sampled_from("UDLR"), min_size=1, max_size=40))
def test_rewards_of_the_turns_add_up_to_the_worth_of_the_walk(maze: Maze, moves: list[str]) -> None:
    rewards, metrics = play(maze, len(moves) + 1, moves)
    (at_once,), whole = play(maze, 1, ["".join(moves[: len(rewards)])])
    assert sum(rewards) == pytest.approx(at_once)
    assert metrics == whole
    assert 0.0 <= at_once <= 1.0


def test_loops_earn_nothing_over_many_turns() -> None:
    rewards, _ = play(MAZE, 100, ["D", "U"] * 40 + ["D"])
    assert sum(rewards) == pytest.approx(0.5 / 6)


def test_answers_after_a_wall_earn_nothing() -> None:
    env = make(MAZE, 10)
    assert env.step("R")["done"]
    assert [env.step(move)["reward"] for move in PATH] == [0.0] * len(PATH)


@given(st.sampled_from(MAZES), st.lists(st.text("UDLR", max_size=2), min_size=1))
def test_the_same_answers_give_the_same_trajectory(maze: Maze, answers: list[str]) -> None:
    assert play(maze, 10, answers) == play(maze, 10, answers)


def test_skyrl_averages_the_metrics() -> None:
    metrics = [play(MAZE, 1, [answer])[1] for answer in (PATH, "DDR")]
    assert aggregate_for_environment("maze", metrics) == {"success": 0.5, "progress": 0.75, "malformed": 0.0}


@pytest.mark.parametrize("row", [None, {}, {"reward_spec": None}, {"reward_spec": {"ground_truth": "42"}}])
def test_a_row_without_a_maze_is_refused(row: dict[str, Any] | None) -> None:
    with pytest.raises(ConfigError, match="maze"):
        skyrl_gym.make("maze", extras=row)
