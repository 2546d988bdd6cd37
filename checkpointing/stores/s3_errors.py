"""What an answer of S3 means: try again, fetch credentials, or tell the user what to do."""

import re

from botocore.exceptions import ClientError
from obstore.exceptions import AlreadyExistsError, PermissionDeniedError, UnauthenticatedError

from checkpointing.errors import AlreadyExists, KeyMissing, StoreError

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}

_AGAIN = {"ConditionalRequestConflict", "NoSuchUpload"}
"""A race between creators without a winner so far; an upload in parts that somebody else has ended."""

_PERMIT = "allow GetObject, PutObject, DeleteObject, AbortMultipartUpload and ListBucket there for these credentials"
_CREDENTIALS = "correct the AWS credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, profile or role)"
_REGION = "set AWS_REGION to the bucket's region"
_KMS = "correct checkpoints.kms_key, and have its key enabled"
_ADVICE = {
    "AccessDenied": _PERMIT,
    "AllAccessDisabled": _PERMIT,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "InvalidAccessKeyId": _CREDENTIALS,
    "InvalidBucketName": "correct the bucket's name in the URL",
    "InvalidToken": _CREDENTIALS,
    "NoSuchBucket": "create the bucket, or correct its name in the URL",
    "NotImplemented": "use a server that has this operation",
    "PermanentRedirect": _REGION,
    "RequestTimeTooSkewed": "set this machine's clock",
    "SignatureDoesNotMatch": _CREDENTIALS,
}
"""{S3 error code: what to do}, of errors that trying again does not cure."""


class Transient(Exception):
    """What failed, and may succeed when tried again."""


class Expired(Transient):
    """With fresh credentials."""


def explained(error: Exception, doing: str, where: str) -> Exception:
    """What to raise for an `error` of obstore or boto3: Transient, or a StoreError that says what to do.

    Codes that are not known are Transient: the worst is an error that comes late.
    """
    code, reason = _reason(error)
    if code in _EXPIRED:
        return Expired(reason)
    if code in _AGAIN:
        return Transient(reason)
    advice = (
        _ADVICE.get(code) or (_KMS if code.startswith("KMS.") else None) or (_PERMIT if _is_denied(error) else None)
    )
    if advice:
        return StoreError(f"cannot {doing} {where}: {reason}; {advice}. What was stored before is untouched")
    if isinstance(error, AlreadyExistsError):
        return AlreadyExists(f"{where} exists, and may be created only once")
    if isinstance(error, FileNotFoundError):
        return KeyMissing(f"{where} does not exist")
    return Transient(reason)


def _is_denied(error: Exception) -> bool:
    if isinstance(error, ClientError):
        return error.response["ResponseMetadata"]["HTTPStatusCode"] in (401, 403)
    if isinstance(error, UnauthenticatedError):
        return "credential provider" not in str(error)  # what issues credentials may only be away for a moment
    return isinstance(error, PermissionDeniedError)


def _reason(error: Exception) -> tuple[str, str]:
    """(S3's error code or "", what happened in a few words). Never the whole answer: S3 quotes requests in it."""
    if isinstance(error, ClientError):
        answer = error.response["Error"]
        return answer.get("Code") or "", f"{answer.get('Code')}: {answer.get('Message')}"
    text = str(error).partition("\n\nDebug source")[0]
    code = match[1] if (match := re.search(r"<Code>([\w.]+)</Code>", text)) else ""
    message = match[1] if (match := re.search(r"<Message>([^<]*)</Message>", text)) else ""
    return code, f"{code}: {message}" if code else text.partition(": <?xml")[0]
