"""Staging: what is copied while training stands still is what is written, and is laid out as safetensors would."""

import os
import signal
import subprocess
import sys
from collections.abc import Buffer, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointing.blobs import get_blob
from checkpointing.errors import FormatError, StoreError
from checkpointing.staging import Spec, StagingBuffer, image_of, write_staged
from checkpointing.store import Store, open_store
from checkpointing.tensors import pack_tensors, tensor_digest
from trainer.captured import Captured
from trainer.staging import stage_entries
from trainer.state import Entry

from .checkpoint_samples import Wrapper, listen

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]  # fmt: skip


def entry(name: str, captured: Captured) -> Entry:
    return Entry(name, lambda owner: captured, lambda owner, captured: None)


@pytest.fixture
def buffer() -> Iterator[StagingBuffer]:
    made = StagingBuffer()
    yield made
    made.close()


def tensors_of(shapes: list[tuple[torch.dtype, list[int]]]) -> dict[str, torch.Tensor]:
    made = {}
    for index, (dtype, shape) in enumerate(shapes):
        count = int(torch.tensor(shape).prod()) if shape else 1
        raw = torch.arange(count * 8, dtype=torch.int64).to(torch.uint8)[: count * dtype.itemsize]
        raw = raw % 2 if dtype == torch.bool else raw
        made[f'{"ñ" * (index % 3)}"layer"/{index}'] = raw.clone().view(dtype).reshape(shape)
    return made


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=12))
def test_the_image_is_the_file_that_safetensors_writes(shapes: list[tuple[torch.dtype, list[int]]]) -> None:
    tensors = tensors_of(shapes)
    image = image_of({n: Spec(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()})
    expected = pack_tensors(tensors)
    assert expected.startswith(image.header)
    assert image.nbytes == len(expected)
    buffer = StagingBuffer()
    staged = stage_entries([entry("policy/parameters", Captured(tensors, None))], None, buffer, 0, 1)
    assert buffer.memory is not None
    shard = staged.shards[0]
    assert buffer.memory[shard.offset : shard.offset + shard.nbytes] == expected
    buffer.close()


def test_a_dtype_without_a_name_in_the_format_is_refused(buffer: StagingBuffer) -> None:
    odd = Captured({"w": torch.zeros(2, dtype=torch.complex64)}, None)
    with pytest.raises(FormatError, match="w: tensors of complex64"):
        stage_entries([entry("policy/parameters", odd)], None, buffer, 0, 1)


def test_what_is_written_is_the_state_at_the_moment_of_the_copy(buffer: StagingBuffer, store: Store) -> None:
    weight, strided = torch.randn(5, 7), torch.randn(6, 4).t()
    before = {"weight": weight.clone(), "strided": strided.clone()}
    entries = [
        entry("policy/parameters", Captured({"weight": weight, "strided": strided}, {"a": 1})),
        entry("policy/lr_scheduler", Captured({}, [1, 2])),
    ]
    staged = stage_entries(entries, None, buffer, 3, 9)
    weight.zero_()  # training goes on
    strided.zero_()
    written = write_staged(staged, [store])
    shard = written["policy/parameters"]
    assert shard.rank == 3 and shard.tensors and shard.data
    held = safetensors.torch.load(get_blob(store, shard.tensors))
    assert all(torch.equal(held[name], before[name]) for name in before)
    assert shard.tensor_digests == {name: tensor_digest(tensor) for name, tensor in before.items()}
    assert get_blob(store, shard.data) == b'{"a":1}'
    schedule = written["policy/lr_scheduler"]
    assert schedule.tensors is None and schedule.data and get_blob(store, schedule.data) == b"[1,2]"


def test_the_buffer_is_reused_and_grows(buffer: StagingBuffer) -> None:
    small = stage_entries([entry("policy/parameters", Captured({"w": torch.ones(10)}, None))], None, buffer, 0, 1)
    first = buffer.memory
    again = stage_entries([entry("policy/parameters", Captured({"w": torch.ones(11)}, None))], None, buffer, 0, 2)
    assert buffer.memory is first and small.path == again.path
    stage_entries([entry("policy/parameters", Captured({"w": torch.ones(10_000)}, None))], None, buffer, 0, 3)
    assert buffer.memory is not None and len(buffer.memory) > 40_000


def test_every_store_gets_it_and_every_shard_is_announced(
    buffer: StagingBuffer, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, Any]] = []
    listen(monkeypatch, lambda name, where: said.append((name, where.get("entry"))))
    stores = [open_store(str(tmp_path / name)) for name in "ab"]
    staged = stage_entries([entry("policy/parameters", Captured({"w": torch.ones(3)}, 1))], None, buffer, 0, 1)
    write_staged(staged, stores)
    assert stores[0].list("") == stores[1].list("") and len(stores[0].list("")) == 2
    assert ("save.shard_written", "policy/parameters") in said


class Full(Wrapper):
    def put(self, key: str, data: Buffer) -> None:
        left = memoryview(data).cast("B")
        if isinstance(data, memoryview):
            raise StoreError(f"no space for the {len(left)} bytes")


def test_a_refusal_is_told_as_it_is(buffer: StagingBuffer, store: Store) -> None:
    """Its traceback holds views of the buffer that is to be closed."""
    staged = stage_entries([entry("policy/parameters", Captured({"w": torch.ones(3)}, 1))], None, buffer, 0, 1)
    with pytest.raises(StoreError, match="no space"):
        write_staged(staged, [Full(store)])


OTHER = """
import sys, torch
from checkpointing.staging import StagingBuffer
memory = (buffer := StagingBuffer()).reserve(4096)
memory[:5] = b"hello"
print(buffer.path, flush=True)
sys.stdin.read()
"""


def test_another_process_reads_it_and_death_frees_it(store: Store) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OTHER], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        path = other.stdout.readline().strip()
        staged: Any = SimpleNamespace(path=path, nbytes=4096, role="policy", rank=0, step=4, shards=[])
        assert write_staged(staged, [store]) == {}
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        with pytest.raises(StoreError, match="step 4: what policy rank 0 staged is gone"):
            write_staged(staged, [store])
