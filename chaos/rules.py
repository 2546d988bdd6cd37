"""A proxy as a process of its own, and the files by which faults in any process tell it what to do.

<folder>/upstream          "host:port" of what is behind it, read for each request
<folder>/port              where it listens, written when it does
<folder>/rules/<i>.json    a rule of `chaos.proxy` that is in force, named by the fault's index; gone when it is healed
<folder>/applied/<i>       a line for each request that the rule was applied to
"""

import json
import sys
import threading
from pathlib import Path
from typing import Any

from pydantic import Field

from chaos import scene as scenes
from chaos.proxy import FOREVER, FaultProxy, Rule
from chaos.scene import Scene


class Late(scenes.Parameters):
    delay: float = Field(default=5.0, gt=0)
    """Seconds before a request is passed on."""


def impose(scene: Scene, action: str, **rule: Any) -> None:
    """From now on the proxy in front of the target does `action` to what matches; the rest as in `chaos.proxy.Rule`."""
    path = _rule(scene)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps({"action": action, "times": FOREVER} | rule))
    aside.replace(path)


def lift(scene: Scene) -> None:
    _rule(scene).unlink(missing_ok=True)


def applied(scene: Scene) -> str | None:
    """That a request really met the rule, as the proxy has recorded it; None while none has."""
    path = scene.proxy / "applied" / str(scene.fired.index)
    if not path.exists() or not (lines := path.read_text().splitlines()):
        return None
    return f"the proxy did so to {lines[0]}"


def _rule(scene: Scene) -> Path:
    return scene.proxy / "rules" / f"{scene.fired.index}.json"


class _Folder:
    """The rules that a folder holds. One that was seen stays the same object: it counts how often it was applied."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rules: dict[tuple[str, int], Rule] = {}
        (folder / "rules").mkdir(parents=True, exist_ok=True)
        (folder / "applied").mkdir(exist_ok=True)

    def upstream(self) -> tuple[str, int]:
        host, _, port = (self._folder / "upstream").read_text().strip().rpartition(":")
        return host, int(port)

    def rules(self) -> list[Rule]:
        found = {}
        for path in sorted((self._folder / "rules").glob("*.json")):
            try:
                key = (path.stem, path.stat().st_mtime_ns)
                found[key] = self._rules.get(key) or Rule(
                    **json.loads(path.read_text()), record=self._folder / "applied" / path.stem
                )
            except FileNotFoundError:
                continue  # just healed
        self._rules = found
        return list(found.values())


def main() -> None:
    folder = Path(sys.argv[1])
    told = _Folder(folder)
    proxy = FaultProxy(told.upstream, more_rules=told.rules)
    aside = folder / "port.tmp"
    aside.write_text(str(proxy.port))
    aside.replace(folder / "port")
    threading.Event().wait()  # until it is killed


if __name__ == "__main__":
    main()
