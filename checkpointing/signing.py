"""Signatures: who may have made a commit. See docs/decisions/0007-signatures.md.

A commit names its manifest by digest and a manifest its blobs, so that one Ed25519 signature over the commit covers all
that a checkpoint is. What is signed is the canonical JSON of the commit without `signature` and `check`.

Whoever saves needs the private key, which never stands in a config: a file that the config names, or KEY_VARIABLE.
Whoever reads needs the public key alone, which is no secret.
"""

import os
from collections.abc import Buffer, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from checkpointing.canonical import canonical_json
from checkpointing.errors import ConfigError, CorruptBlob, FormatError
from checkpointing.records import Strict
from checkpointing.store import Item, Promises, Store

KEY_VARIABLE = "HARNESS_CHECKPOINT_PRIVATE_KEY"
"""Holds the private key as PEM text where no file does. (Its name is one that redaction.py knows for a secret's.)"""

PublicKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""The 32 bytes of an Ed25519 public key."""


class Signature(Strict):
    key: PublicKey
    value: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


class Signer:
    """`public`: what its signatures are verified with."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public: str = private.public_key().public_bytes_raw().hex()

    def sign(self, data: bytes) -> Signature:
        return Signature(key=self.public, value=self._private.sign(data).hex())


class Trust(BaseModel):
    """Whose commits are believed. `keys`: these public keys'; None: whoever's, as long as the signature holds.

    `required`: one that is not signed is not believed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[PublicKey, ...] | None = None
    required: bool = False

    def check(self, key: str, data: bytes) -> None:
        """Require of the commit record `data` under `key` that it may be believed. What is no record is not judged.

        Raises:
            CorruptBlob: it may not, and why.
        """
        body = _json(data)
        if not isinstance(body, dict):
            return
        signature = body.get("signature")
        if signature is None:
            if self.required:
                raise CorruptBlob(f"{key} is not signed, and checkpoints.signing requires that it is")
            return
        signer = signed_by(body)
        if signer is None:
            raise CorruptBlob(
                f"{key}: its signature does not hold: it was changed, or not made by the key that it names"
            )
        if self.keys is not None and signer not in self.keys:
            raise CorruptBlob(f"{key} is signed by {signer}, which is not among checkpoints.signing.trusted")


ANYBODY = Trust()


class Signing(BaseModel):
    """The `checkpoints.signing:` section of a run config."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key_file: Path | None = Field(
        default=None, description=f"Ed25519 private key, PEM; without it {KEY_VARIABLE} in the environment holds one"
    )
    trusted: tuple[PublicKey, ...] = Field(
        default=(),
        description="public keys, 64 hex digits each, whose commits are restored besides those of the own key",
    )
    required: bool = Field(default=True, description="whether a commit that is not signed is refused")

    def signer(self) -> Signer | None:
        """None if there is no key, as for one who only reads.

        Raises:
            ConfigError: it can't be read, or is no Ed25519 private key.
        """
        try:
            if self.key_file:
                return _signer(self.key_file.read_bytes(), str(self.key_file))
        except OSError as error:
            raise ConfigError(f"checkpoints.signing.key_file: {error}; mount the key there") from None
        text = os.environ.get(KEY_VARIABLE)
        return _signer(text.encode(), KEY_VARIABLE) if text else None

    def trust(self) -> Trust:
        """Raises ConfigError: no key at all is named whose signatures could be verified; or as `signer`."""
        own = self.signer()
        keys = dict.fromkeys([*([own.public] if own else []), *self.trusted])
        if not keys:
            raise ConfigError(
                f"checkpoints.signing: no key; set key_file or {KEY_VARIABLE} to sign, or `trusted` to only read"
            )
        return Trust(keys=tuple(keys), required=self.required)


class Believed:
    """A store whose commits are read only if `trust` says so. Everything else, and all writing, is as it was."""

    def __init__(self, store: Store, trust: Trust) -> None:
        self._store, self._trust = store, trust

    @property
    def promises(self) -> Promises:
        return self._store.promises

    def put(self, key: str, data: Buffer) -> None:
        self._store.put(key, data)

    def get(self, key: str) -> bytes:
        """Raises CorruptBlob too: a commit that is not believed."""
        data = self._store.get(key)
        if key.startswith("commits/"):
            self._trust.check(key, data)
        return data

    def list(self, prefix: str) -> Sequence[Item]:
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def create(self, key: str, data: Buffer) -> None:
        self._store.create(key, data)


def signed_by(body: dict[str, Any]) -> str | None:
    """The public key whose signature on the record `body` holds; None if none does."""
    try:
        signature = Signature.model_validate(body["signature"])
        signed = canonical_json({name: value for name, value in body.items() if name not in ("signature", "check")})
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.key)).verify(bytes.fromhex(signature.value), signed)
    except (KeyError, ValueError, FormatError, InvalidSignature):
        return None
    return signature.key


def _json(data: bytes) -> Any:
    """None if it is none."""
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError:
        return None


@cache
def _signer(text: bytes, where: str) -> Signer:
    try:
        private = load_pem_private_key(text, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        private = None  # and the error is dropped: it may quote what was read
    if not isinstance(private, Ed25519PrivateKey):
        raise ConfigError(
            f"{where}: not an Ed25519 private key in PEM form without a password; "
            "make one with `openssl genpkey -algorithm ed25519`"
        )
    return Signer(private)
