"""Checks that every request passes before the application sees it, and headers that every response carries."""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dpl.core.errors import InputError, SettingError
from dpl.serve.metrics import Metrics
from dpl.serve.schemas import Overloaded, handle_error
from dpl.serve.settings import ServeSettings
from dpl.serve.store import is_stream_id

__all__ = ["RequestFilter", "Tokens", "check_stream_id", "is_loopback", "replay", "require_token", "same_site"]

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
        self._known = [(_digest(token), prefix) for token, prefix in tokens]
        self.tenants = frozenset(prefix for _, prefix in tokens)  # tokens with the same prefix share all quotas

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

        The time taken does not depend on how similar the token is to a valid one.
        """
        scheme, _, token = header.partition(" ")
        given, found = _digest(token.strip()), None
        for digest, prefix in self._known:
            if hmac.compare_digest(digest, given):
                found = prefix
        return found if scheme.lower() == "bearer" else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_token(host: str, tokens: Tokens | None) -> None:
    """Refuse to serve other machines without a token."""
    if tokens is None and not is_loopback(host):
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


def check_stream_id(stream_id: str) -> str:
    """Return a valid stream name, or raise."""
    if not is_stream_id(stream_id):
        raise InputError(
            f"stream {stream_id[:100]!r}: expected 1 to 100 letters, digits, '.', '_' or '-', "
            "the first and last a letter or digit"
        )
    return stream_id


class RequestFilter:
    """The outermost layer of the application: every request passes the same checks in the same order.

    Header, origin and token, size, quota of its token; then the whole body is read, and only then the application runs.
    It is cancelled if the client leaves.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings, tokens: Tokens | None, metrics: Metrics) -> None:
        self._app, self._settings, self._tokens, self._metrics = app, settings, tokens, metrics
        self._requests: Counter[str] = Counter()  # in progress, by tenant
        self._uploads: Counter[str] = Counter()  # bytes of their bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, then pass it on or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._metrics)
        try:
            self._check_header(scope, exchange.headers)
            with self._in_progress(exchange) as tenant:
                body = await self._body(exchange, tenant)
                await _unless_gone(self._app(scope, replay(body), exchange.send), receive)
        except ClientDisconnect:
            return
        except Exception as error:
            if not isinstance(error, HTTPException):
                stream = scope.get("path_params", {}).get("stream_id")
                _log.exception("request %s", scope["state"]["request_id"], extra={"stream": stream})
                error = HTTPException(500, "unexpected error; the log has details")
            if not exchange.started:
                await handle_error(Request(scope), error)(scope, exchange.receive, exchange.send)

    def _check_header(self, scope: Scope, headers: Headers) -> None:
        """Refuse what can be refused by the header alone; note which streams the caller may see."""
        settings, path = self._settings, scope["path"]
        size = sum(len(name) + len(value) for name, value in headers.raw)
        if len(headers.raw) > settings.max_header_fields or size > settings.max_header:
            raise HTTPException(431, f"a header of {len(headers.raw)} fields and {size} bytes is too long", _CLOSE)
        if scope["state"].get("surplus") and path not in _HEALTH:
            raise HTTPException(503, "too many connections", {"Retry-After": "5", **_CLOSE})
        if self._tokens is None and not same_site(headers.get("host", ""), headers.get("origin")):
            raise HTTPException(403, "requests from other sites are refused", _CLOSE)
        prefix = "" if self._tokens is None else self._tokens.prefix(headers.get("authorization", ""))
        if prefix is None and path not in _PUBLIC:
            ask = {"WWW-Authenticate": "Bearer", **_CLOSE}
            raise HTTPException(401, "expected a header Authorization: Bearer TOKEN", ask)
        scope["state"]["prefix"] = _NOBODY if prefix is None else prefix
        length, limit = headers.get("content-length", "0"), self._largest_body(path)
        if length.isdecimal() and int(length) > limit:
            raise HTTPException(413, f"{length} bytes; the limit is {limit}")

    def _largest_body(self, path: str) -> int:
        """Return the limit of a body in bytes; only images need a large one."""
        largest = self._settings.max_body
        return largest if path.endswith(("/predict", "/infer")) else min(largest, _SMALL_BODY)

    @contextmanager
    def _in_progress(self, exchange: "_Exchange") -> Iterator[str]:
        """Count a request and its bytes while the block runs; the operator's own, without a prefix, have no limit."""
        limit = self._settings.requests_per_token
        tenant = _NOBODY if exchange.scope["path"] in _PUBLIC else exchange.scope["state"]["prefix"]
        if tenant not in ("", _NOBODY) and self._requests[tenant] >= limit:
            raise Overloaded(429, f"{limit} requests of this token are in progress (requests_per_token)", 1)
        self._requests[tenant] += 1
        try:
            yield tenant
        finally:
            self._requests[tenant] -= 1
            self._uploads[tenant] -= exchange.size

    async def _body(self, exchange: "_Exchange", tenant: str) -> bytes:
        """Read a body that is neither too large nor too slow, and fits into the tenant's share of the memory."""
        settings, parts = self._settings, []
        limit, start = self._largest_body(exchange.scope["path"]), asyncio.get_running_loop().time()
        while not exchange.complete:
            patience = min(settings.timeout, settings.header_timeout + exchange.size / settings.min_rate)
            try:
                async with asyncio.timeout_at(start + patience):
                    part = (await exchange.receive()).get("body", b"")
            except TimeoutError:
                reason = f"{exchange.size} bytes of the body arrived within {patience:.1f} s, which is too slow"
                raise HTTPException(408, reason, {"Retry-After": "1", **_CLOSE}) from None
            parts.append(part)
            exchange.size += len(part)
            self._uploads[tenant] += len(part)
            if exchange.size > limit:
                raise HTTPException(413, f"more than {limit} bytes")
            if exchange.size and self._uploads[tenant] > settings.uploads_per_token:
                raise Overloaded(429, "too many bytes of this token are in memory (uploads_per_token)", 1)
        return b"".join(parts)


def replay(body: bytes) -> Receive:
    """Return a `receive` that gives the body, and then waits for a disconnection that never comes."""
    messages: asyncio.Queue[Message] = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
    return messages.get


async def _unless_gone(work: Awaitable[None], receive: Receive) -> None:
    """Do the work, but cancel it when the client disconnects."""
    running, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnection(receive))
    gone.add_done_callback(lambda _: running.cancel())
    try:
        await running
    except asyncio.CancelledError:
        if not gone.done():
            raise
    finally:
        gone.cancel()


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Exchange:
    """One request and its response: notes when the body is complete, adds headers, counts."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, metrics: Metrics) -> None:
        self.scope, self._receive, self._send, self._metrics = scope, receive, send, metrics
        self.headers = Headers(scope=scope)
        given = self.headers.get("x-request-id", "")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = self.request_id
        self._start = time.monotonic()
        self.complete = self.started = False
        self.size = 0  # bytes of the body that were kept

    async def receive(self) -> Message:
        """Pass on a part of the body."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.complete = True
            raise ClientDisconnect
        self.complete = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Pass on a part of the response.

        If the client is still sending, the rest of its body is read before the response ends; otherwise it would see a
        reset connection instead of the response.
        """
        if message["type"] == "http.response.start":
            self.started = True
            self._label(message)
        elif not message.get("more_body", False) and not self.complete and self._has_body():
            await self._send({**message, "more_body": True})
            with suppress(TimeoutError, ClientDisconnect):
                async with asyncio.timeout(_DRAIN_SECONDS):
                    while not self.complete:
                        await self.receive()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    def _has_body(self) -> bool:
        """Return whether a body follows; with `Expect` its sender waits for an answer first."""
        given = self.headers.get("content-length", "0") != "0" or "transfer-encoding" in self.headers
        return given and "expect" not in self.headers

    def _label(self, message: Message) -> None:
        headers = MutableHeaders(scope=message)
        for name, value in {"X-Request-ID": self.request_id, **_HEADERS}.items():
            headers.setdefault(name, value)
        endpoint = getattr(self.scope.get("route"), "path", "none")
        self._metrics.requests.labels(endpoint, str(message["status"])).inc()
        self._metrics.seconds.labels(endpoint).observe(time.monotonic() - self._start)
