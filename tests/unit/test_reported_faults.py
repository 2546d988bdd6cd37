"""docs/reported-faults.md names tests that exist."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_every_test_that_is_named_exists() -> None:
    rows = [line for line in (REPOSITORY / "docs" / "reported-faults.md").read_text().splitlines() if "#" in line[2:]]
    assert len(rows) > 20
    for row in rows:
        match = re.search(r"`(tests/\S+?\.py)(?:::(\w+))?`", row)
        assert match, row
        source = (REPOSITORY / match[1]).read_text()
        assert f"def {match[2] or 'test_'}" in source, row
