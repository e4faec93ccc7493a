"""Checks that every request passes first (origin, token, size), and headers that every response carries."""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dpl.core.errors import InputError, SettingError
from dpl.serve.metrics import Metrics
from dpl.serve.schemas import SafeJSON, error_answer

__all__ = [
    "EVERYTHING", "Access", "FilterRules", "RequestFilter", "Tokens", "check_stream_id", "is_loopback", "require_token",
    "same_site",
]  # fmt: skip

_STREAM_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHORTEST_TOKEN = 16
_LOCAL_NAMES = {"localhost", "127.0.0.1", "::1"}
_PUBLIC = {"/", "/docs", "/healthz", "/readyz", "/openapi.json"}
_DRAIN_SECONDS = 5.0
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_log = logging.getLogger("dpl.serve")


@dataclass(frozen=True)
class Access:
    """What a caller may see: the streams whose names start with `prefix`; an empty one means everything."""

    prefix: str = ""

    def allows(self, stream_id: str) -> bool:
        """Return whether the caller may use a stream."""
        return stream_id.startswith(self.prefix)


EVERYTHING = Access()


class Tokens:
    """The valid bearer tokens, kept as hashes."""

    def __init__(self, tokens: Sequence[tuple[str, str]]) -> None:
        if not tokens:
            raise SettingError("no token given: expected at least one")
        for token, _ in tokens:
            if len(token) < _SHORTEST_TOKEN:
                raise SettingError(f"a token has {len(token)} characters: expected at least {_SHORTEST_TOKEN}")
        self._known = [(_digest(token), Access(prefix)) for token, prefix in tokens]

    @classmethod
    def from_file(cls, path: Path) -> "Tokens":
        """Read lines of `TOKEN [STREAM_PREFIX]`; empty lines and lines that start with # are skipped."""
        expected = f"{path}: expected lines of the form TOKEN [STREAM_PREFIX]"
        try:
            text = path.read_text()
        except UnicodeDecodeError as error:
            raise SettingError(f"{expected}, not a binary file") from error
        lines = [line.split() for line in text.splitlines() if line.strip() and line.strip()[0] != "#"]
        if not lines or any(len(words) > 2 for words in lines):
            raise SettingError(expected)
        return cls([(words[0], words[1] if len(words) == 2 else "") for words in lines])

    def access(self, header: str) -> Access | None:
        """Return what an Authorization header gives access to, or None.

        The time taken does not depend on how similar the token is to a valid one.
        """
        scheme, _, token = header.partition(" ")
        given, found = _digest(token.strip()), None
        for digest, access in self._known:
            if hmac.compare_digest(digest, given):
                found = access
        return found if scheme.lower() == "bearer" else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
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
    """Return a valid stream name, or raise; it becomes the name of a folder."""
    if not _STREAM_ID.fullmatch(stream_id):
        raise InputError(
            f"stream {stream_id[:100]!r}: expected 1 to 100 letters, digits, '.', '_' or '-', "
            "the first and last a letter or digit"
        )
    return stream_id


@dataclass(frozen=True)
class FilterRules:
    """Limits and tokens that a request is checked against, and the metrics that count it."""

    max_body: int
    timeout: float
    tokens: Tokens | None
    metrics: Metrics


class RequestFilter:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, rules: FilterRules) -> None:
        self._app, self._rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, then pass it on or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        exchange = _Exchange(scope, receive, send, self._rules)
        refused = self._refusal(scope, headers, request_id)
        try:
            await (refused or self._app)(scope, exchange.receive, exchange.send)
        except Exception:
            _log.exception("request %s", request_id)
            if not exchange.started:
                failed = error_answer(500, "unexpected error; the log has details", request_id)
                await failed(scope, exchange.receive, exchange.send)

    def _refusal(self, scope: Scope, headers: Headers, request_id: str) -> SafeJSON | None:
        tokens = self._rules.tokens
        if tokens is None and not same_site(headers.get("host", ""), headers.get("origin")):
            return error_answer(403, "requests from other sites are refused", request_id)
        access = EVERYTHING if tokens is None else tokens.access(headers.get("authorization", ""))
        if access is None and scope["path"] not in _PUBLIC:
            ask = {"WWW-Authenticate": "Bearer"}
            return error_answer(401, "expected a header Authorization: Bearer TOKEN", request_id, ask)
        scope["state"]["access"] = access or Access("\0")  # no stream has this prefix
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._rules.max_body:
            return error_answer(413, f"{length} bytes; the limit is {self._rules.max_body}", request_id)
        return None


class _Exchange:
    """One request and its response: limits the body, adds headers, counts."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, rules: FilterRules) -> None:
        self._scope, self._receive, self._send, self._rules = scope, receive, send, rules
        self._start = time.monotonic()
        self._deadline = asyncio.get_running_loop().time() + rules.timeout
        self._received = 0
        self._complete = False
        self.started = False

    async def receive(self) -> Message:
        """Pass on a part of the body; refuse a body that is too large or too slow."""
        if self._complete:  # what follows is the client's disconnection, which has no time limit
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            reason = f"the body did not arrive within {self._rules.timeout} s"
            raise HTTPException(408, reason, {"Retry-After": "1"}) from None
        self._note(message)
        if self._received > self._rules.max_body:
            raise HTTPException(413, f"more than {self._rules.max_body} bytes")
        return message

    async def send(self, message: Message) -> None:
        """Pass on a part of the response.

        If the client is still sending, the rest of its body is read before the response ends; otherwise it would see a
        reset connection instead of the response.
        """
        if message["type"] == "http.response.start":
            self.started = True
            self._label(message)
        elif not message.get("more_body", False) and not self._complete and not self._has_no_body():
            await self._send({**message, "more_body": True})
            await self._drain()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    def _note(self, message: Message) -> None:
        self._received += len(message.get("body", b""))
        self._complete |= message["type"] == "http.disconnect" or not message.get("more_body", False)

    def _has_no_body(self) -> bool:
        headers = Headers(scope=self._scope)
        no_body = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        return no_body or "expect" in headers

    async def _drain(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                while not self._complete:
                    self._note(await self._receive())

    def _label(self, message: Message) -> None:
        headers = MutableHeaders(scope=message)
        headers["X-Request-ID"] = self._scope["state"]["request_id"]
        for name, value in _HEADERS.items():
            headers.setdefault(name, value)
        endpoint = getattr(self._scope.get("route"), "path", "none")
        self._rules.metrics.requests.labels(endpoint, str(message["status"])).inc()
        self._rules.metrics.seconds.labels(endpoint).observe(time.monotonic() - self._start)
