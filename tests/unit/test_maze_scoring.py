import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.maze.maze import Maze, generate
from trainer.maze.scoring import CLOSEST_FAILURE, SUCCESS, Walk, follow, parse_moves, succeeded, worth

MAZES = [generate(4, f"scoring/{index}") for index in range(300)]
BACK = {"U": "D", "D": "U", "L": "R", "R": "L"}

mazes = st.sampled_from(MAZES)
moves = st.text("UDLR", max_size=60)


def reward(maze: Maze, answer: str) -> float:
    """Of an answer that holds the whole path."""
    parsed = parse_moves(answer)
    return 0.0 if parsed is None else worth(maze, follow(maze, Walk(maze.start), parsed))


@pytest.mark.parametrize("answer", ["RRD", "R R D", " R\nR\tD ", "RRD<|im_end|>", "R R D <|im_end|>"])
def test_spacing_and_end_of_turn_do_not_matter(answer: str) -> None:
    assert parse_moves(answer) == "RRD"


@pytest.mark.parametrize("answer", ["", " ", "<|im_end|>", "rrd", "RIGHT", "R,R", "R<|im_end|>R", "R1", "➡", "\0"])
def test_anything_else_is_malformed(answer: str) -> None:
    assert parse_moves(answer) is None


@given(mazes, st.text())
def test_any_text_has_a_reward_between_0_and_1(maze: Maze, answer: str) -> None:
    assert 0.0 <= reward(maze, answer) <= SUCCESS


@given(mazes, moves)
def test_only_a_legal_walk_that_ends_on_the_goal_is_worth_more_than_half(maze: Maze, answer: str) -> None:
    cell, legal = maze.start, True
    for move in answer:
        there = maze.after(cell, move)
        if there is None:
            legal = False
            break
        cell = there
    solved = legal and cell == maze.goal
    assert succeeded(maze, follow(maze, Walk(maze.start), answer)) == solved
    assert reward(maze, answer) == SUCCESS if solved else reward(maze, answer) <= CLOSEST_FAILURE


def test_each_move_along_the_path_is_worth_more_and_the_last_one_most() -> None:
    for maze in MAZES:
        path = maze.shortest_path()
        worths = [reward(maze, path[:length]) for length in range(1, len(path) + 1)]
        assert worths == sorted(set(worths))
        assert worths[-1] == SUCCESS
        assert all(earned < CLOSEST_FAILURE for earned in worths[:-1])


@given(mazes, moves, st.data())
def test_going_back_and_forth_earns_nothing(maze: Maze, answer: str, data: st.DataObject) -> None:
    walk = Walk(maze.start)
    for move in answer:
        onward = follow(maze, walk, move)
        walk = walk if onward.broken else onward
    possible = [move for move in BACK if maze.after(walk.cell, move)]
    move = data.draw(st.sampled_from(possible))
    times = data.draw(st.integers(1, 20))
    assert follow(maze, walk, (move + BACK[move]) * times) == walk


def test_walking_through_a_wall_earns_nothing_and_ends_the_walk() -> None:
    maze = Maze(3, frozenset({(0, 1)}), (0, 0), (0, 2))  # the goal lies straight behind a wall
    assert reward(maze, "RR") == 0.0
    assert reward(maze, "RDRRU") == 0.0
    assert reward(maze, "DRRU") == SUCCESS
    assert reward(maze, "DRUUU") == reward(maze, "DR")


def test_passing_the_goal_is_no_success() -> None:
    maze = Maze(3, frozenset({(1, 1)}), (0, 0), (0, 1))
    assert reward(maze, "R") == SUCCESS
    assert reward(maze, "RR") == 0.0
    assert reward(maze, "RU") == CLOSEST_FAILURE


def test_a_broken_walk_stays_broken() -> None:
    maze = MAZES[0]
    assert follow(maze, Walk(maze.start, broken=True), maze.shortest_path()) == Walk(maze.start, broken=True)


def test_no_answer_is_worth_much_without_looking_at_the_maze() -> None:
    short = ["".join(answer) for length in range(1, 5) for answer in itertools.product("UDLR", repeat=length)]
    rng = random.Random(0)
    long = ["".join(rng.choices("UDLR", k=200)) for _ in range(100)]
    patterns = ["UDLR" * 50, "RD" * 50, "RL" * 50, "R" * 50]
    for answer in short + long + patterns:
        assert statistics.mean(reward(maze, answer) for maze in MAZES) < 0.1, answer
