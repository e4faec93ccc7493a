"""Requests and answers as plain data, so that they can travel between processes."""

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope

__all__ = ["Ask", "Reply", "answered"]

Pairs = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class Ask:
    """A complete request."""

    method: str
    path: str
    query: bytes = b""
    headers: Pairs = ()
    body: bytes = b""

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> "Ask":
        """Take a request off its connection."""
        headers = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
        return cls(scope["method"], scope["path"], scope["query_string"], headers, body)

    def scope(self) -> Scope:
        """Return what an application is called with."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": list(self.headers),
            "client": None,
            "server": None,
            "state": {},
        }


@dataclass(frozen=True)
class Reply:
    """A complete answer."""

    status: int
    headers: Pairs
    body: bytes

    def response(self) -> Response:
        """Return it as the web framework wants it."""
        response = Response(self.body, status_code=self.status)
        response.raw_headers = list(self.headers)
        return response


async def answered(app: ASGIApp, ask: Ask) -> Reply:
    """Let an application in this process answer a request."""
    return await collect(app, ask.scope(), _feed(ask.body))


async def collect(app: ASGIApp, scope: Scope, receive: Receive) -> Reply:
    """Run an application and gather what it sends."""
    start: dict[str, Any] = {}
    parts: list[bytes] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    headers = tuple((bytes(name), bytes(value)) for name, value in start["headers"])
    return Reply(start["status"], headers, b"".join(parts))


def _feed(body: bytes) -> Receive:
    """Give the body once; after that the client stays, as far as the application can tell, until it is cancelled."""
    given = False

    async def receive() -> Message:
        nonlocal given
        if given:
            await asyncio.Event().wait()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
