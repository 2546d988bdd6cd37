"""The parameters of the maze task."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]


class MazeSpec(BaseModel):
    """All that determines data, tokenizer and base model. Equal specs give equal files on one machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    size: Annotated[int, Field(ge=2)] = 4
    train: Positive = 4096
    held_out: Annotated[int, Field(ge=200)] = 256
    """200 or more, or the confidence interval of a success rate is too wide to tell models apart."""
    seed: int = 0
    max_turns: Positive = 1
    """1: the whole path in one answer. More: one move a turn."""

    hidden_size: Annotated[int, Field(ge=64, multiple_of=64)] = 128
    layers: Positive = 5
    warm_up_steps: Positive = 120
    warm_up_batch: Positive = 64
