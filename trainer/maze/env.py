"""The maze as a SkyRL-Gym environment."""

from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from checkpointing.errors import ConfigError
from trainer.maze.maze import Maze
from trainer.maze.render import observation
from trainer.maze.scoring import Walk, follow, parse_moves, progress, succeeded, worth


class MazeEnv(BaseTextEnv):
    """One trajectory through the maze of a dataset row; a pure function of the row and the answers.

    With `max_turns` 1 the answer is the whole path, else one move a turn and the model is told which moves are possible
    next. The trajectory ends on the goal, at a wall, at an answer that is no move, or with its turns.

    `extras` holds the row's columns, of which `reward_spec.ground_truth` is the maze as JSON, and SkyRL's `max_turns`.

    Raises:
        ConfigError: the row holds no maze.
    """

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        row = extras or {}
        ground_truth = (row.get("reward_spec") or {}).get("ground_truth")
        if ground_truth is None:
            raise ConfigError("maze environment: the dataset row has no reward_spec.ground_truth; build the data anew")
        self._maze = Maze.from_json(ground_truth)
        self._walk = Walk(self._maze.start)
        self._malformed = False
        self.max_turns = row.get("max_turns", 1)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Reward is the worth gained this turn: over a trajectory it adds up to the worth of the walk, in [0, 1]."""
        before = worth(self._maze, self._walk)
        moves = parse_moves(action)
        if moves is None or (self.max_turns > 1 and len(moves) > 1):
            self._malformed = True
            self._walk = Walk(self._walk.cell, broken=True)
        else:
            self._walk = follow(self._maze, self._walk, moves)
        self.turns += 1
        done = self._walk.broken or succeeded(self._maze, self._walk) or self.turns >= self.max_turns
        return BaseTextEnvStepOutput(
            observations=[] if done else observation(self._maze, self._walk.cell),
            reward=worth(self._maze, self._walk) - before,
            done=done,
            metadata={},
        )

    def get_metrics(self) -> dict[str, float]:
        """`success` is the one to report: SkyRL's pass_at_n counts any reward above 0, progress alone included."""
        return {
            "success": float(succeeded(self._maze, self._walk)),
            "progress": progress(self._maze, self._walk),
            "malformed": float(self._malformed),
        }
