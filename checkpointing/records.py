"""How every record of a checkpoint is written and read: canonical JSON that names its format and version."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from checkpointing.canonical import canonical_json, digest
from checkpointing.errors import CorruptBlob, FormatError

FORMAT = "harness-checkpoint"

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Strict(BaseModel):
    """Nothing unknown, nothing converted, nothing changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Record(Strict):
    format: Literal["harness-checkpoint"] = "harness-checkpoint"
    version: Literal[1] = 1


def encode(record: Record) -> bytes:
    return canonical_json(record.model_dump(mode="json"))


def decode[R: Record](kind: type[R], data: bytes, name: str) -> R:
    """Read `data`, whose integrity is known, as a record. `name` is the key it came from.

    Raises:
        FormatError: foreign, of a newer version, or not a valid record.
    """
    try:
        body = _json_object(data)
        if body.get("format") != FORMAT:
            raise FormatError(f"not a {FORMAT} record, its format is {body.get('format')!r}")
        version, newest = body.get("version"), max(get_args(kind.model_fields["version"].annotation))
        if type(version) is not int or version > newest:  # `isinstance` would let `true` be version 1
            raise FormatError(f"format version {version}, this program reads up to {newest}; use the newer program")
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "record"
        raise FormatError(f"{name}: {where}: {first['msg']}") from error
    except (ValueError, FormatError) as error:
        raise FormatError(f"{name}: {error}") from error


def seal(record: Record) -> bytes:
    """`encode` with a `check`: the digest of the rest. For records whose key is not their digest."""
    return canonical_json(record.model_dump(mode="json") | {"check": digest(encode(record))})


def unseal[R: Record](kind: type[R], data: bytes, name: str) -> R:
    """Read what `seal` wrote. The check comes first: a flipped bit in `version` is damage, not a newer format.

    Raises:
        CorruptBlob: damaged.
        FormatError: foreign, of a newer version, or not a valid record.
    """
    try:
        body = _json_object(data)
        check = body.pop("check", None)
        rest = canonical_json(body)
    except (ValueError, FormatError) as error:
        raise CorruptBlob(f"{name} is damaged: {error}") from error
    foreign = check is None and body.get("format") != FORMAT
    if check != digest(rest) and not foreign:
        raise CorruptBlob(f"{name} is damaged: its content does not match its check")
    return decode(kind, rest, name)


def _json_object(data: bytes) -> dict[str, Any]:
    """Raises ValueError."""
    body = from_json(data, allow_inf_nan=False)
    if not isinstance(body, dict):
        raise ValueError("not a JSON object")
    return body
