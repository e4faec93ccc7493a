"""Limits of connections, checks of requests before the application sees them, headers that every response carries."""

import asyncio
import hashlib
import ipaddress
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import h11
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from dpl.core.errors import SettingError
from dpl.serve.monitoring import Metrics
from dpl.serve.schemas import Overloaded, error_answer, handle_error
from dpl.serve.settings import ServeSettings

__all__ = ["RequestFilter", "Tokens", "limited_protocol", "replay", "require_token", "same_site"]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHORTEST_TOKEN = 16
_LOCAL_NAMES = {"localhost", "127.0.0.1", "::1"}
_HEALTH = {"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"}
_PUBLIC = {"/", "/docs", "/openapi.json"} | _HEALTH
_DRAIN_SECONDS = 5.0
_SMALL_BODY = 2**16  # bytes, of a request without images; what is parsed from it takes no time
_NOBODY = "\0"  # a prefix that no stream has
_CLOSE = {"Connection": "close"}
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_log = logging.getLogger("dpl.serve")


class Tokens:
    """The valid bearer tokens, kept as hashes, with the prefix of the streams that each may see."""

    def __init__(self, tokens: Sequence[tuple[str, str]]) -> None:
        if not tokens:
            raise SettingError("no token given: expected at least one")
        shortest = min(len(token) for token, _ in tokens)
        if shortest < _SHORTEST_TOKEN:
            raise SettingError(f"a token has {shortest} characters: expected at least {_SHORTEST_TOKEN}")
        self._prefixes = {_digest(token): prefix for token, prefix in tokens}
        self.tenants = frozenset(self._prefixes.values())  # tokens with the same prefix share all quotas

    @classmethod
    def from_file(cls, path: Path) -> "Tokens":
        """Read lines of `TOKEN [STREAM_PREFIX]`; empty lines and lines that start with # are skipped."""
        expected = f"{path}: expected lines of the form TOKEN [STREAM_PREFIX]"
        try:
            lines = [line.split() for line in path.read_text().splitlines()]
        except UnicodeDecodeError as error:
            raise SettingError(f"{expected}, not a binary file") from error
        given = [words for words in lines if words and words[0][0] != "#"]
        if not given or any(len(words) > 2 for words in given):
            raise SettingError(expected)
        return cls([(words[0], "".join(words[1:])) for words in given])

    def prefix(self, header: str) -> str | None:
        """Return which streams an Authorization header gives access to; an empty prefix means all, None no access.

        A token that is similar to a valid one has another hash, so the time of the look-up tells nothing about it.
        """
        scheme, _, token = header.partition(" ")
        return self._prefixes.get(_digest(token.strip())) if scheme.lower() == "bearer" else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def require_token(host: str, tokens: Tokens | None) -> None:
    """Refuse to serve other machines without a token."""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if tokens is None and not local:
        raise SettingError(
            f"--host {host} can be reached from other machines: give --token-file FILE (a line of at least "
            f"{_SHORTEST_TOKEN} characters), or serve on 127.0.0.1"
        )


def same_site(host: str, origin: str | None) -> bool:
    """Return whether a request to a server without tokens comes from this machine itself.

    A page of another site can make a browser send requests here; they have a foreign Origin. It can also let a name of
    its own point to this address; such requests have a foreign Host.
    """
    name = host if host.endswith("]") else host.rsplit(":", 1)[0]
    return name.strip("[]") in _LOCAL_NAMES and (origin is None or origin.split("://", 1)[-1] == host)


class RequestFilter:
    """The outermost layer of the application: every request passes the same checks in the same order.

    Header, origin and token, size, quota of its token; then the whole body is read, and only then the application runs.
    It is cancelled if the client leaves.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings, tokens: Tokens | None, metrics: Metrics) -> None:
        self.app, self.settings, self.tokens, self.metrics = app, settings, tokens, metrics
        self.requests: Counter[str] = Counter()  # in progress, by tenant
        self.uploads: Counter[str] = Counter()  # bytes of their bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, then pass it on or refuse it."""
        if scope["type"] == "http":
            await _Exchange(self, scope, receive, send).run()
        else:
            await self.app(scope, receive, send)


class _Exchange:
    """One request and its response."""

    def __init__(self, outer: RequestFilter, scope: Scope, receive: Receive, send: Send) -> None:
        self._outer, self._settings, self._scope, self._send = outer, outer.settings, scope, send
        self._request, self._path, self._receive = Request(scope, receive), scope["path"], receive
        given = self._request.headers.get("x-request-id", "")
        self._request.state.request_id = self._id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        largest = self._settings.max_body  # only images need a large body
        self._limit = largest if self._path.endswith(("/predict", "/infer")) else min(largest, _SMALL_BODY)
        self._start = time.monotonic()
        self._complete = self._started = False
        self._size = 0  # bytes of the body that were kept

    async def run(self) -> None:
        """Check the request, pass it on, and see to an error."""
        try:
            self._check_header()
            await self._pass_on(_NOBODY if self._path in _PUBLIC else self._request.state.prefix)
        except ClientDisconnect:
            return
        except Exception as error:
            if not isinstance(error, HTTPException):
                stream = self._scope.get("path_params", {}).get("stream_id")
                _log.exception("request %s", self._id, extra={"stream": stream})
                error = HTTPException(500, "unexpected error; the log has details")
            if not self._started:
                await handle_error(self._request, error)(self._scope, self._receive, self._respond)

    def _check_header(self) -> None:
        """Refuse what can be refused by the header alone; note which streams the caller may see."""
        settings, headers, tokens = self._settings, self._request.headers, self._outer.tokens
        size = sum(len(name) + len(value) for name, value in headers.raw)
        if len(headers.raw) > settings.max_header_fields or size > settings.max_header:
            raise HTTPException(431, f"a header of {len(headers.raw)} fields and {size} bytes is too long", _CLOSE)
        if self._scope["state"].get("surplus") and self._path not in _HEALTH:
            raise HTTPException(503, "too many connections", {"Retry-After": "5", **_CLOSE})
        if tokens is None and not same_site(headers.get("host", ""), headers.get("origin")):
            raise HTTPException(403, "requests from other sites are refused", _CLOSE)
        prefix = "" if tokens is None else tokens.prefix(headers.get("authorization", ""))
        if prefix is None and self._path not in _PUBLIC:
            ask = {"WWW-Authenticate": "Bearer", **_CLOSE}
            raise HTTPException(401, "expected a header Authorization: Bearer TOKEN", ask)
        self._request.state.prefix = _NOBODY if prefix is None else prefix
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._limit:
            raise HTTPException(413, f"{length} bytes; the limit is {self._limit}")

    async def _pass_on(self, tenant: str) -> None:
        """Let the application run, within the tenant's quota; the operator's own, without a prefix, have no limit."""
        outer, limit = self._outer, self._settings.requests_per_token
        if tenant not in ("", _NOBODY) and outer.requests[tenant] >= limit:
            raise Overloaded(429, f"{limit} requests of this token are in progress (requests_per_token)", 1)
        outer.requests[tenant] += 1
        try:
            body = await self._body(tenant)
            await _unless_gone(outer.app(self._scope, replay(body), self._respond), self._receive)
        finally:
            outer.requests[tenant] -= 1
            outer.uploads[tenant] -= self._size

    async def _body(self, tenant: str) -> bytes:
        """Read a body that is neither too large nor too slow, and fits into the tenant's share of the memory."""
        settings, parts, start = self._settings, [], asyncio.get_running_loop().time()
        patience = min(settings.timeout, settings.header_timeout)
        try:
            async with asyncio.timeout_at(start + patience) as end:
                async for part in self._request.stream():
                    parts.append(part)
                    self._size += len(part)
                    self._outer.uploads[tenant] += len(part)
                    if self._size > self._limit:
                        raise HTTPException(413, f"more than {self._limit} bytes")
                    if self._size and self._outer.uploads[tenant] > settings.uploads_per_token:
                        raise Overloaded(429, "too many bytes of this token are in memory (uploads_per_token)", 1)
                    patience = min(settings.timeout, settings.header_timeout + self._size / settings.min_rate)
                    end.reschedule(start + patience)
        except TimeoutError:
            reason = f"{self._size} bytes of the body arrived within {patience:.1f} s, which is too slow"
            raise HTTPException(408, reason, {"Retry-After": "1", **_CLOSE}) from None
        self._complete = True
        return b"".join(parts)

    async def _respond(self, message: Message) -> None:
        """Pass on a part of the response.

        If the client is still sending, the rest of its body is read before the response ends; otherwise it would see a
        reset connection instead of the response. With `Expect` it waits for an answer first.
        """
        headers = self._request.headers
        sends = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if message["type"] == "http.response.start":
            self._started = True
            self._label(message)
        elif not message.get("more_body", False) and not self._complete and sends and "expect" not in headers:
            await self._send({**message, "more_body": True})
            with suppress(TimeoutError, ClientDisconnect, RuntimeError):  # the last: it was refused with its end
                async with asyncio.timeout(_DRAIN_SECONDS):
                    async for _ in self._request.stream():
                        pass
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    def _label(self, message: Message) -> None:
        """Add headers to the response, and count it."""
        headers, metrics = MutableHeaders(scope=message), self._outer.metrics
        for name, value in {"X-Request-ID": self._id, **_HEADERS}.items():
            headers.setdefault(name, value)
        endpoint = getattr(self._scope.get("route"), "path", "none")
        metrics.requests.labels(endpoint, str(message["status"])).inc()
        metrics.seconds.labels(endpoint).observe(time.monotonic() - self._start)


def replay(body: bytes) -> Receive:
    """Return a `receive` that gives the body, and then waits for a disconnection that never comes."""
    messages: asyncio.Queue[Message] = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
    return messages.get


async def _unless_gone(work: Awaitable[None], receive: Receive) -> None:
    """Do the work, but cancel it when the client disconnects."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    running, gone = asyncio.ensure_future(work), asyncio.ensure_future(leave())
    gone.add_done_callback(lambda _: running.cancel())
    try:
        await running
    except asyncio.CancelledError:
        if not gone.done():
            raise
    finally:
        gone.cancel()


def limited_protocol(settings: ServeSettings) -> type[H11Protocol]:
    """Return the protocol class for `uvicorn.Config(http=...)`."""
    room = settings.connections
    if sys.platform != "win32":
        import resource

        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = room if files == resource.RLIM_INFINITY else min(room, files // 2)  # the rest is for snapshots, logs ...
    return type("LimitedProtocol", (_LimitedProtocol,), {"settings": settings, "room": room})


class _LimitedProtocol(H11Protocol):
    """Where there are too many connections, the one that waits longest without a request makes room.

    If all of them have requests, the new one is marked as `surplus`: only health is answered there.
    """

    settings: ServeSettings
    room: int
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time for the header, and close another connection if there are too many."""
        super().connection_made(transport)
        self._waiting_since = self.loop.time()
        self._watch_header()
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time."""
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read; the time for a header runs from its first byte to its last."""
        super().data_received(data)
        self._watch_header()

    def on_response_complete(self) -> None:
        """Note since when the connection has no request."""
        self._waiting_since = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or has too long a header (431), in the form of all errors."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            status = int(getattr(sys.exc_info()[1], "error_status_hint", 400))
            answer = error_answer(status, "the header is too long" if status == 431 else msg, "", _CLOSE)
            start = h11.Response(status_code=status, headers=answer.raw_headers)
            for event in (start, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_header(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_watching()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.settings.header_timeout, self.transport.abort)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _make_room(self) -> None:
        others: list[Any] = [c for c in self.connections if c is not self and not c.transport.is_closing()]
        addresses = Counter(_address(other) for other in others)
        if addresses[_address(self)] >= self.settings.connections_per_address:
            crowd = _address(self)
        elif len(others) >= self.room:
            crowd = addresses.most_common(1)[0][0]
        else:
            return
        waiting = [other for other in others if _address(other) == crowd and not _is_busy(other)]
        if waiting:
            min(waiting, key=lambda other: other._waiting_since).transport.abort()
        else:
            self.app_state = {**self.app_state, "surplus": True}


def _address(connection: Any) -> str:
    return connection.client[0] if connection.client else ""


def _is_busy(connection: Any) -> bool:
    """Whether the client waits for a response; without a valid token it never does for long."""
    cycle = connection.cycle
    return cycle is not None and not cycle.response_started and not connection.flow.write_paused
