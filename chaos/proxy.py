"""A proxy in front of an engine or an S3 server that breaks single requests as told, and remembers that it did.

It forwards what it reads unchanged, `Host` included, so S3's signatures stay valid. A request is read whole before it
is passed on (which the rules about a cut undo at their byte), so bodies of some MiB at most; an answer that no rule is
about is passed on as it comes. It speaks plain HTTP.

`python -m chaos.rules FOLDER` runs one as a process of its own, told by files.
"""

import asyncio
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Action = Literal[
    "status",  # answer `status` with S3 error `code`; the server never hears of it
    "drop",  # reset the connection; the server never hears of it
    "swallow",  # answer 200 and an empty object; the server never hears of it
    "cut",  # reset both connections when `at` bytes of the request's body have been passed on
    "truncate",  # the answer ends after `at` bytes of its body
    "flip_request",  # one bit of the request's body, at byte `at`
    "flip_answer",  # one bit of the answer's body, at byte `at`
    "lose_answer",  # the server does the work, the client never hears
    "delay",  # wait `seconds` before passing the request on
    "hang",  # take the request, never answer
    "strip",  # remove `header` from the request and sign it anew, for a server that knows no such header
]


@dataclass
class Rule:
    """Applies to the next `times` requests that match; `fired` counts them."""

    action: Action
    method: str = ".*"
    target: str = ".*"
    """Searched in the path with its query, as it stands in the request line."""
    times: int = 1
    at: int = 0
    status: int = 503
    code: str = "SlowDown"
    seconds: float = 0
    header: str = ""
    record: Path | None = None
    """A file to which each request that it is applied to adds a line."""
    fired: int = field(default=0, init=False)
    happened: threading.Event = field(default_factory=threading.Event, init=False)
    """Set once it has fired."""

    def takes(self, method: str, target: str) -> bool:
        return self.fired < self.times and bool(re.fullmatch(self.method, method) and re.search(self.target, target))

    def apply(self, method: str, target: str) -> None:
        self.fired += 1
        self.happened.set()
        if self.record is not None:
            with self.record.open("a") as lines:
                lines.write(f"{method} {target}\n")


FOREVER = 10**9


@dataclass
class _Message:
    head: bytes
    body: bytes = b""

    @property
    def first_line(self) -> list[str]:
        return self.head.split(b"\r\n", 1)[0].decode("latin1").split(" ")

    def header(self, name: str) -> str:
        match = re.search(rf"(?im)^{re.escape(name)}: *(.*?)\r$", self.head.decode("latin1"))
        return match[1] if match else ""

    def without(self, name: str) -> bytes:
        return re.sub(rb"(?im)^" + re.escape(name.encode()) + rb":.*\r\n", b"", self.head)

    def flipped(self, at: int) -> bytes:
        return self.body[:at] + bytes([self.body[at] ^ 1]) + self.body[at + 1 :]


class _Reset(Exception):
    """Both sides are to see a connection reset."""


class FaultProxy:
    """Listens on `port` of 127.0.0.1 in a thread of its own, until `close`."""

    def __init__(
        self,
        upstream: Callable[[], tuple[str, int]],
        credentials: tuple[str, str] = ("", ""),
        more_rules: Callable[[], list[Rule]] = list,
    ) -> None:
        """
        Args:
            upstream: host and port of the server, asked for each request.
            credentials: access and secret key, for `strip` alone.
            more_rules: asked for each request, after `rules`.
        """
        self._credentials = credentials
        self._more_rules = more_rules
        self.rules: list[Rule] = []
        self.requests: list[tuple[str, str]] = []
        """(method, target) of every request so far, in order of arrival."""
        self.heads: list[str] = []
        """Of the same requests, request line and headers."""
        self._upstream = upstream
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself forgets those whose client has gone
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20))
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault proxy")
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, action: Action, method: str = ".*", target: str = ".*", **rest: Any) -> Rule:
        """See `Rule`. Of rules that match a request the first applies."""
        self.rules.append(Rule(action, method, target, **rest))
        return self.rules[-1]

    def reset(self) -> None:
        self.rules.clear()
        self.requests.clear()
        self.heads.clear()

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            while self._tasks:
                for task in self._tasks:
                    task.cancel()
                await asyncio.wait(self._tasks)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (_Reset, asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            _reset(writer)
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; False if no further one can follow on this connection."""
        request = _Message(await reader.readuntil(b"\r\n\r\n"))
        method, target, _ = request.first_line
        self.requests.append((method, target))
        self.heads.append(request.head.decode("latin1"))
        rule = next((rule for rule in (*self.rules, *self._more_rules()) if rule.takes(method, target)), None)
        if rule:
            rule.apply(method, target)
        if rule and rule.action == "drop":
            raise _Reset
        if request.header("expect"):
            # Said for the server, which would otherwise have to be heard before the body is read.
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.head = request.without("expect")
        if rule and rule.action == "cut":
            await self._cut(request, await reader.readexactly(rule.at))
        request.body = await _body(request, reader)
        if rule and rule.action == "hang":
            await reader.read()  # until the client has had enough
            raise _Reset
        match rule and rule.action:
            case "status" | "swallow":
                assert rule
                writer.write(_own_answer(rule, with_body=method != "HEAD"))
                await writer.drain()
                return True
            case "delay":
                assert rule
                await asyncio.sleep(rule.seconds)
            case "flip_request":
                assert rule
                request.body = request.flipped(rule.at)
            case "strip":
                assert rule
                request.head = request.without(rule.header)
                self._sign(request)
        return await self._forward(rule, request, writer)

    def _sign(self, request: _Message) -> None:
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        method, target, _ = request.first_line
        lines = (line.partition(": ") for line in request.head.decode("latin1").split("\r\n")[1:])
        headers = {name.lower(): value for name, _, value in lines if name.lower().startswith(("host", "x-amz-"))}
        signed = AWSRequest(method, f"http://{headers['host']}{target}", headers=headers, data=request.body)
        S3SigV4Auth(Credentials(*self._credentials), "s3", "us-east-1").add_auth(signed)
        for name in ("authorization", "x-amz-date", "x-amz-content-sha256"):
            line = f"{name}: {signed.headers[name]}\r\n".encode()
            request.head = request.without(name)[:-2] + line + b"\r\n"

    async def _forward(self, rule: Rule | None, request: _Message, writer: asyncio.StreamWriter) -> bool:
        """Whether another request can follow."""
        reader, upstream = await asyncio.open_connection(*self._upstream(), limit=1 << 20)
        try:
            upstream.write(request.head + request.body)
            answer = _Message(await reader.readuntil(b"\r\n\r\n"))
            empty = request.first_line[0] == "HEAD" or answer.first_line[1] in ("204", "304")
            parts = _nothing() if empty else _body_parts(answer, reader)
            if rule and rule.action in ("lose_answer", "flip_answer", "truncate"):
                answer.body = b"".join([part async for part in parts])
                if rule.action == "lose_answer":
                    raise _Reset
                writer.write(answer.head + (answer.flipped(rule.at) if rule.action == "flip_answer" else b""))
                if rule.action == "truncate":
                    writer.write(answer.body[: rule.at])
                    await writer.drain()
                    raise _Reset
            else:
                writer.write(answer.head)
                async for part in parts:
                    writer.write(part)
                    await writer.drain()
            await writer.drain()
            return True
        finally:
            upstream.close()

    async def _cut(self, request: _Message, body: bytes) -> None:
        _, writer = await asyncio.open_connection(*self._upstream())
        writer.write(request.head + body)
        await writer.drain()
        _reset(writer)
        raise _Reset


async def _body(message: _Message, reader: asyncio.StreamReader) -> bytes:
    return b"".join([part async for part in _body_parts(message, reader)])


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def _body_parts(message: _Message, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The body as it travels, as it comes: of a chunked one with its framing."""
    if "chunked" not in message.header("transfer-encoding").lower():
        left = int(message.header("content-length") or 0)
        while left:
            part = await reader.read(left)
            if not part:
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(part)
            yield part
        return
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        if size == 0:
            break
        yield line + await reader.readexactly(size + 2)
    while True:
        yield line
        if line == b"\r\n":
            return
        line = await reader.readuntil(b"\r\n")


def _own_answer(rule: Rule, with_body: bool) -> bytes:
    if rule.action == "swallow":
        return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    body = f"<?xml version='1.0'?><Error><Code>{rule.code}</Code><Message>injected</Message></Error>".encode()
    head = (
        f"HTTP/1.1 {rule.status} X\r\nContent-Type: application/xml\r\nContent-Length: {len(body) * with_body}\r\n\r\n"
    )
    return head.encode() + body * with_body


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close so that the peer sees a reset and not an orderly end."""
    connection = writer.get_extra_info("socket")
    if connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
