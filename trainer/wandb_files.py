"""What wandb holds offline: its transaction logs, read as far as they are whole.

One file per attempt, `*run-<time>-<id>/run-<id>.wandb`: 7 bytes of header, then LevelDB's log format with zlib's CRC32.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

_HEADER, _BLOCK = 7, 32768
_FRAME = struct.Struct("<IHB")  # CRC32 of kind and data, length, kind
_FULL, _FIRST, _LAST = 1, 2, 4


def last_step(folder: Path, run_id: str) -> int:
    """The last step in wandb's `folder` of the run, over all attempts; -1 if there is none."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # made at run time

    last = -1
    for path in folder.glob(f"*run-*-{run_id}/run-{run_id}.wandb"):
        for data in transaction_log(path.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                last = max(last, record.history.step.num)
    return last


def transaction_log(log: bytes) -> Iterator[bytes]:
    """The records of a file, up to the first that is torn or damaged: nothing after it can be found."""
    at, record = _HEADER, b""
    while at + _FRAME.size <= len(log):
        left = _BLOCK - at % _BLOCK
        if left < _FRAME.size:
            at += left  # no frame begins so near the end of a block
            continue
        crc, length, kind = _FRAME.unpack_from(log, at)
        at += _FRAME.size
        data = log[at : at + length]
        at += length
        if len(data) < length or zlib.crc32(data, zlib.crc32(bytes([kind]))) != crc:
            return
        record = data if kind in (_FULL, _FIRST) else record + data
        if kind in (_FULL, _LAST):
            yield record
