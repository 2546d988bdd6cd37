"""Whether a secret was left anywhere below a folder."""

import base64
import json
from pathlib import Path
from urllib.parse import quote


def assert_no_secret(folder: Path, secret: str) -> None:
    """Require that no file below `folder`, by name or content, holds `secret`: as it is, or as JSON, URLs and base64
    write it; of several lines, none of them. That there are files at all is required too."""
    looked_at, found = 0, []
    forms = {form for line in secret.splitlines() for form in _forms(line)}
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        looked_at += 1
        data = path.read_bytes()
        found += [path for form in forms if form in data or form in str(path.relative_to(folder)).encode()]
    assert looked_at, f"{folder}: nothing there"
    assert not found, f"the secret is in {', '.join(sorted({str(path) for path in found}))}"


def _forms(line: str) -> list[bytes]:
    text = line.encode()
    escaped = [json.dumps(line)[1:-1].encode(), json.dumps(line, ensure_ascii=False)[1:-1].encode()]
    # Inside a longer base64 text only what does not share a group of three bytes with a neighbour is the same.
    encoded = [base64.b64encode(text[skip : skip + (len(text) - skip) // 3 * 3]) for skip in range(3)]
    return [text, quote(line, safe="").encode(), *escaped, *(form for form in encoded if len(form) >= 8)]
