"""Tensors survive as they are, to the bit, and their digest sees every bit."""

import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from checkpointing.canonical import digest
from checkpointing.errors import FormatError
from checkpointing.tensors import pack_tensors, tensor_digest, unpack_tensors

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
]
BASE = torch.arange(24, dtype=torch.float32).reshape(4, 6)

TENSORS = {
    "matrix": BASE,
    "0-dim": torch.tensor(3.5),
    "empty": torch.empty(0, 3, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "transposed": BASE.t(),
    "strided": BASE[:, ::2],
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
    **{str(dtype): torch.arange(5).to(dtype) for dtype in DTYPES},
}


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def test_round_trip_keeps_every_bit() -> None:
    back = unpack_tensors(pack_tensors(TENSORS))
    assert back.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(back[name]) == bits(tensor), name
        assert tensor_digest(back[name]) == tensor_digest(tensor), name


@given(st.lists(st.integers(0, 2**32 - 1), max_size=8), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_any_bit_pattern_survives(words: list[int], dtype: torch.dtype) -> None:
    pattern = torch.tensor([*words, 0][: len(words) // 2 * 2], dtype=torch.uint32).view(torch.uint8).view(dtype)
    back = unpack_tensors(pack_tensors({"x": pattern}))["x"]
    assert bits(back) == bits(pattern)
    assert tensor_digest(back) == tensor_digest(pattern)


def test_the_file_is_plain_safetensors_and_the_same_for_the_same_tensors() -> None:
    data = pack_tensors(TENSORS)
    assert pack_tensors(dict(reversed(TENSORS.items()))) == data
    assert load(data).keys() == TENSORS.keys()


def test_tensors_that_share_memory_are_all_written() -> None:
    tied = {"embedding": BASE, "head": BASE, "row": BASE[1]}
    back = unpack_tensors(pack_tensors(tied))
    assert all(torch.equal(back[name], tied[name]) for name in tied)


def test_what_was_unpacked_outlives_the_name_of_the_data() -> None:
    back = unpack_tensors(bytes(bytearray(pack_tensors({"x": torch.arange(1000)}))))
    assert torch.equal(back["x"], torch.arange(1000))


@given(st.data())
def test_a_hostile_file_is_an_error_and_nothing_else(data: st.DataObject) -> None:
    """Headers that lie about length, offsets, shapes and types; sizes that overflow; any byte changed."""
    whole = bytearray(pack_tensors({"a": BASE, "b": torch.arange(3)}))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 160))
        whole[at] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    for tried in (bytes(whole), cut):
        try:
            back = unpack_tensors(tried)
        except FormatError:
            continue
        assert sum(tensor.nbytes for tensor in back.values()) <= len(tried)


@pytest.mark.parametrize(
    "field",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2**62, 2], "data_offsets": [0, 8]},
        {"dtype": "object", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "code": "os.system"},
        ["F32"],
    ],
)
def test_a_header_that_lies_is_refused(field: object) -> None:
    header = json.dumps({"x": field}).encode()
    with pytest.raises(FormatError, match="not a safetensors file"):
        unpack_tensors(len(header).to_bytes(8, "little") + header + bytes(8))


def test_digests_tell_apart_whatever_differs() -> None:
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    different = [
        torch.zeros(2, 3),
        torch.zeros(3, 2),
        torch.zeros(6),
        torch.zeros(6, dtype=torch.int32),
        torch.zeros(12, dtype=torch.bfloat16),
        torch.zeros(12, dtype=torch.float16),
        -torch.zeros(6),
        torch.zeros(0),
        torch.zeros(0, 1),
        torch.zeros(()),
        torch.zeros(1),
        nan[:1],
        nan[1:],
    ]
    for one, other in itertools.combinations(different, 2):
        assert tensor_digest(one) != tensor_digest(other), (one, other)


def test_layout_and_gradient_do_not_count() -> None:
    assert tensor_digest(BASE.t()) == tensor_digest(BASE.t().contiguous())
    assert tensor_digest(torch.nn.Parameter(BASE)) == tensor_digest(BASE)


def test_the_digest_is_what_the_format_says() -> None:
    tensor = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    assert tensor_digest(tensor) == digest(b'["bfloat16",[1,2]]' + b"\x80\x3f\x00\x40")


@pytest.mark.parametrize("data", [b"", b"\x80\x04K\x01.", pack_tensors({"x": torch.zeros(2)})[:-1]])
def test_anything_else_is_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError, match="safetensors"):
        unpack_tensors(data)
