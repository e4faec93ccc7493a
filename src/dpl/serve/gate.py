"""What every request passes before anything else: origin, token, size; and what every answer carries."""

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dpl.serve.answers import BodyTooLarge, SafeJSON, error_answer
from dpl.serve.metrics import Metrics
from dpl.serve.security import OPEN, Access, Tokens, same_site, valid_request_id

__all__ = ["Gate", "GateRules"]

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
class GateRules:
    """What the gate checks."""

    max_body: int
    tokens: Tokens | None
    metrics: Metrics


class Gate:
    """The outermost layer."""

    def __init__(self, app: ASGIApp, rules: GateRules) -> None:
        self._app, self._rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and pass it on, or answer why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id")
        request_id = given if given is not None and valid_request_id(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        passage = _Passage(scope, receive, send, self._rules, request_id)
        refused = self._refusal(scope, headers, request_id)
        try:
            await (refused or self._app)(scope, passage.receive, passage.send)
        except Exception:
            _log.exception("request %s", request_id)
            if not passage.started:
                await error_answer(500, "unexpected error; the log has details", request_id)(
                    scope, passage.receive, passage.send
                )

    def _refusal(self, scope: Scope, headers: Headers, request_id: str) -> SafeJSON | None:
        tokens = self._rules.tokens
        if tokens is None and not same_site(headers.get("host", ""), headers.get("origin")):
            return error_answer(403, "requests from other sites are refused", request_id)
        access = OPEN if tokens is None else tokens.access(headers.get("authorization", ""))
        if access is None and scope["path"] not in _PUBLIC:
            return error_answer(401, "expected a header Authorization: Bearer TOKEN", request_id,
                                {"WWW-Authenticate": "Bearer"})  # fmt: skip
        scope["state"]["access"] = access or Access("\0")  # a prefix that no stream has
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._rules.max_body:
            return error_answer(413, f"{length} bytes; the limit is {self._rules.max_body}", request_id)
        return None


class _Passage:
    """The two directions of one request: what comes in is counted, what goes out is labelled."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, rules: GateRules, request_id: str) -> None:
        self._scope, self._receive, self._send, self._rules = scope, receive, send, rules
        self._request_id = request_id
        self._start = time.monotonic()
        self._received = 0
        self._complete = False
        self.started = False

    async def receive(self) -> Message:
        """Pass a part of the body on, unless it is too much by now."""
        message = await self._receive()
        self._note(message)
        if self._received > self._rules.max_body:
            raise BodyTooLarge(f"more than {self._rules.max_body} bytes")
        return message

    async def send(self, message: Message) -> None:
        """Label the answer; a client that still sends is heard out, or it would never see the answer."""
        if message["type"] == "http.response.start":
            self.started = True
            self._label(message)
        elif not message.get("more_body", False) and not self._complete and not self._nothing_more_comes():
            await self._send({**message, "more_body": True})
            await self._drain()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    def _note(self, message: Message) -> None:
        self._received += len(message.get("body", b""))
        self._complete |= message["type"] == "http.disconnect" or not message.get("more_body", False)

    def _nothing_more_comes(self) -> bool:
        headers = Headers(scope=self._scope)
        no_body = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        return no_body or "expect" in headers

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                while not self._complete:
                    self._note(await self._receive())
        except TimeoutError:
            pass

    def _label(self, message: Message) -> None:
        headers = MutableHeaders(scope=message)
        headers["X-Request-ID"] = self._request_id
        for name, value in _HEADERS.items():
            headers.setdefault(name, value)
        endpoint = getattr(self._scope.get("route"), "path", "none")
        self._rules.metrics.requests.labels(endpoint, str(message["status"])).inc()
        self._rules.metrics.seconds.labels(endpoint).observe(time.monotonic() - self._start)
