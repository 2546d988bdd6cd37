"""What must not be repeated from a log: passwords, tokens and keys, by their values where known, else by their form."""

import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any
from urllib.parse import quote

LEFT_OUT = "***"

_SECRET = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE_KEY", re.I
)
"""Names of environment variables."""

_SHORTEST = 6
"""Characters. Leaving out what is shorter would leave out ordinary words."""

_FORMS = (
    r"(://[^\s/:@]*:)[^\s/@]+(?=@)",  # the password in a URL
    r"(\bauthorization[\"']?\s*[:=]\s*[\"']?)[^\s\"'][^\"'\r\n]*",
    r"(\bbearer\s+)[\w.~+/=-]{6,}",
    r"(\bx-amz-(?:signature|security-token|credential)[\"']?\s*[:=]\s*[\"']?)[^&\s\"']+",  # presigned requests
    r"()\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",  # AWS access key ids
    r"()\b(?:gh[pousr]_|github_pat_|hf_|sk-)\w[\w-]{19,}",
    # NAME=value and "name": "value". A lower-case `token` is no secret in this trade.
    r"((?:secret|password|passwd|api[_-]?key|access[_-]?key|session[_-]?token)[\w-]*[\"']?\s*[:=]\s*[\"']?)"
    r"[^\s\"',;)}\]]{6,}",
    r"((?-i:_TOKEN)[\"']?\s*[:=]\s*[\"']?)[^\s\"',;)}\]]{6,}",
)

_HINTS = ("://", "auth", "bearer", "amz-", "akia", "asia", "gh", "hf_", "sk-", "secret", "passw", "key", "token")
"""Every form holds one of these in lower case. Most lines do not, and need no closer look, which is slow."""

Redact = Callable[[str], str]


def redactor(environment: Mapping[str, str] = os.environ) -> Redact:
    """A function that returns a line of a log with every secret in it replaced by `LEFT_OUT`.

    Secrets are the values of environment variables whose names say so, and what has the form of one.
    """
    secrets = [value for name, value in environment.items() if _SECRET.search(name)]
    # A key in PEM form has several lines, and what is looked at is one.
    parts = {part for value in secrets for part in (value, *value.splitlines())}
    return _redactor(frozenset(part for part in parts if len(part) >= _SHORTEST))


def redacted(text: str) -> str:
    """`text` without the secrets of this process's environment, and without what has the form of one."""
    return redactor()(text)


def redacted_tree(tree: Any) -> Any:
    """`tree`, of what JSON can hold, with every string in it `redacted`."""
    if isinstance(tree, dict):
        return {name: redacted_tree(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [redacted_tree(value) for value in tree]
    return redacted(tree) if isinstance(tree, str) else tree


@cache
def _redactor(values: frozenset[str]) -> Redact:
    known = sorted(values | {quote(value, safe="") for value in values}, key=len, reverse=True)
    values_known = re.compile("|".join(map(re.escape, known)) or r"(?!)")
    forms = [re.compile(form, re.IGNORECASE) for form in _FORMS]

    def redact(line: str) -> str:
        line = values_known.sub(LEFT_OUT, line)
        lower = line.lower()
        if any(hint in lower for hint in _HINTS):
            for form in forms:
                line = form.sub(r"\g<1>" + LEFT_OUT, line)
        return line

    return redact
