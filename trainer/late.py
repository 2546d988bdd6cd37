"""A rank that says where it can be reached before it imports what it needs for everything else.

SkyRL starts rank 0, asks it for an address, and starts the other ranks only then. With ranks that import torch and
transformers first, a start or a rebuild would wait for that twice; like this, all ranks import at the same time.
"""

import importlib
import inspect
import socket
from collections.abc import Callable
from typing import Any

import ray


class _Late:
    """Stands in for the class `name` of `module`, whose methods the subclasses that `late` makes forward."""

    module: str
    name: str

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._made: Any = None

    def get_master_addr_port(self) -> tuple[str, int]:
        """Where rank 0 will listen for the others; chosen here if nobody has."""
        if not self._arguments["master_addr"]:
            self._arguments |= {"master_addr": ray.util.get_node_ip_address().strip("[]"), "master_port": _free_port()}
        return self._arguments["master_addr"], self._arguments["master_port"]

    def _real(self) -> Any:
        if self._made is None:
            self._made = getattr(importlib.import_module(self.module), self.name)(**self._arguments)
        return self._made


def late(real: type) -> type:
    """A class with all methods of `real`, which is imported and made at the first call of one of them."""
    methods = {
        name: _forward(name, inspect.iscoroutinefunction(method))
        for name, method in inspect.getmembers(real, inspect.isroutine)
        if not name.startswith("__") and not hasattr(_Late, name)
    }
    return type(real.__name__, (_Late,), {"module": real.__module__, "name": real.__name__} | methods)


def _forward(name: str, is_async: bool) -> Callable[..., Any]:
    def method(self: _Late, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._real(), name)(*args, **kwargs)

    async def async_method(self: _Late, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._real(), name)(*args, **kwargs)

    return async_method if is_async else method


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
