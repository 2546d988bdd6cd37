"""The base model: a small Qwen3 and its tokenizer, made and warmed up here, without a hub.

The tokenizer has one token a byte and no merges. So a maze costs one token a cell, a move is one token, text encodes to
the same tokens wherever it stands in a conversation, and any text at all survives the round trip.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer.maze.maze import MOVES, Maze
from trainer.maze.render import Message, observation, prompt
from trainer.maze.scoring import END_OF_ANSWER, Walk, follow
from trainer.maze.spec import MazeSpec

PADDING = "<|endoftext|>"
START_OF_MESSAGE = "<|im_start|>"
ROLES = ["system", "user", "assistant"]

# ChatML. The generation tags mark what the warm-up learns: the model's own words and the end of its turn.
CHAT_TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}\
{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

DOUBT = 0.1
"""Label smoothing over the moves. A model sure of what little it knows samples the same answer again and again, and a
group of equal rewards teaches GRPO nothing; this one knows legal moves and is left unsure, for GRPO to find out."""

THREADS = 1
"""Fixed: another number of threads adds up in another order and so gives another model. One, because on a busy machine
two spend their time waiting for each other."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """262 tokens: three that mark messages and padding, 256 bytes, and the roles as a token each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([PADDING, START_OF_MESSAGE, END_OF_ANSWER, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_ANSWER,
        pad_token=PADDING,
        additional_special_tokens=[START_OF_MESSAGE],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(ROLES)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def demonstration(maze: Maze, max_turns: int) -> list[Message]:
    """The conversation in which the maze is solved on the shortest path, as MazeEnv would hold it."""
    path = maze.shortest_path()
    if max_turns == 1:
        return [*prompt(maze), {"role": "assistant", "content": path}]
    messages, walk = prompt(maze), Walk(maze.start)
    for move in path[:max_turns]:
        walk = follow(maze, walk, move)
        messages += [{"role": "assistant", "content": move}, *observation(maze, walk.cell)]
    return messages[:-1]  # the trajectory ends with the last move: nothing is observed after it


def make_base_model(mazes: list[Maze], spec: MazeSpec, folder: Path) -> dict[str, float]:
    """Make the model, warm it up on `mazes`, save it with its tokenizer in `folder`; returns figures of the warm-up."""
    tokenizer = make_tokenizer()
    with _reproducible(spec.seed):
        model = Qwen3ForCausalLM(_config(spec, tokenizer))
        tokens, labels = encode(mazes, spec.max_turns, tokenizer)
        moves = torch.tensor(tokenizer.convert_tokens_to_ids(list(MOVES)))
        figures = _warm_up(model, tokens, labels, moves, spec)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return figures


def _config(spec: MazeSpec, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=3 * spec.hidden_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.hidden_size // 32,
        num_key_value_heads=spec.hidden_size // 64,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )


def encode(mazes: list[Maze], max_turns: int, tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of the demonstrations, both [mazes, longest]; labels are -100 outside of the answers."""
    encoded: Any = tokenizer.apply_chat_template(
        [demonstration(maze, max_turns) for maze in mazes],
        return_dict=True,
        return_assistant_tokens_mask=True,
        padding=True,
        return_tensors="pt",
    )
    answers = torch.as_tensor(encoded["assistant_masks"]).bool()
    return encoded["input_ids"], encoded["input_ids"].masked_fill(~answers, -100)


def unsure_loss(logits: torch.Tensor, labels: torch.Tensor, moves: torch.Tensor) -> torch.Tensor:
    """Cross entropy of `logits` [batch, length, vocabulary], the moves sharing `DOUBT` of each label's probability."""
    answers = labels[:, 1:] != -100
    logprobs = logits[:, :-1][answers].log_softmax(-1)
    right = logprobs.gather(-1, labels[:, 1:][answers].unsqueeze(-1)).squeeze(-1)
    return -((1 - DOUBT) * right + DOUBT * logprobs[:, moves].mean(-1)).mean()


def _warm_up(
    model: Qwen3ForCausalLM, tokens: torch.Tensor, labels: torch.Tensor, moves: torch.Tensor, spec: MazeSpec
) -> dict[str, float]:
    """Supervised steps on random batches, in place; `moves` are the token ids of the moves."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in name]
    # Muon gets as far as AdamW in less than half the steps; it is made for the hidden matrices only.
    optimizers = [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0), torch.optim.AdamW(others, lr=3e-3)]

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / 30, 2 * (1 - step / spec.warm_up_steps))

    schedules = [LambdaLR(optimizer, rate) for optimizer in optimizers]
    started, losses = time.monotonic(), []
    model.train()
    for _ in range(spec.warm_up_steps):
        batch = torch.randint(len(tokens), (spec.warm_up_batch,))
        loss = unsure_loss(model(input_ids=tokens[batch]).logits, labels[batch], moves)
        model.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        losses.append(loss.item())
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "seconds": time.monotonic() - started,
    }


@contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """Seed torch and fix its threads inside, and leave the caller's generator and threads as they were."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
