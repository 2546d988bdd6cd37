"""One byte string for one value, so that equal values have equal digests wherever they were written."""

import json
from collections.abc import Buffer
from typing import Any

from blake3 import blake3

from checkpointing.errors import FormatError

_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_json(obj: Any) -> bytes:
    """`obj` as UTF-8 JSON: keys sorted by code point, no spaces, nothing escaped that need not be.

    Raises:
        FormatError: `obj` is not JSON: a NaN or infinity, an object, a key that is not a string beside one that is.
    """
    try:
        return _JSON.encode(obj).encode()
    except (TypeError, ValueError) as error:
        raise FormatError(
            f"cannot be written as canonical JSON: {error}; use strings, whole and finite numbers"
        ) from error


def digest(data: Buffer) -> str:
    """BLAKE3 of `data`, 64 lower-case hex digits."""
    return blake3(data).hexdigest()
