"""The front of a divided server: each request goes to the part that owns its stream, some go to all parts."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from dpl.serve.answers import BodyTooLarge, error_answer
from dpl.serve.cluster.merge import merged_health, merged_metrics, merged_server, merged_streams
from dpl.serve.cluster.relay import Ask, Reply
from dpl.serve.engine import Overloaded
from dpl.serve.gate import Gate, GateRules
from dpl.serve.shard import owner

__all__ = ["Front", "Link", "make_front"]

Link = Callable[[Ask], Awaitable[Reply]]  # the way to one part; raises Overloaded when there is none at present
_STREAM = re.compile(r"/v1/streams/([^/]+)")
_MERGES: Mapping[str, Callable[[Ask, Sequence[Reply | Overloaded]], Reply]] = {
    "/v1/streams": merged_streams,
    "/v1/server": merged_server,
    "/metrics": merged_metrics,
    "/healthz": merged_health,
    "/readyz": merged_health,
}


def make_front(links: Sequence[Link], rules: GateRules, timeout: float) -> ASGIApp:
    """Return the application that stands before the parts; tokens and sizes are checked here already."""
    return Gate(Front(links, timeout), rules)


class Front:
    """Finds the part for a request and passes its answer on as it is."""

    def __init__(self, links: Sequence[Link], timeout: float) -> None:
        self._links, self._timeout = links, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request_id = str(scope["state"]["request_id"])
        try:
            ask = Ask.of(_with_id(scope, request_id), await self._body(receive))
            response: Any = (await self._answer(ask)).response()
        except BodyTooLarge as error:
            response = error_answer(413, str(error), request_id)
        except Overloaded as error:
            response = error_answer(error.status, str(error), request_id, {"Retry-After": str(error.retry_after)})
        await response(scope, receive, send)

    async def _body(self, receive: Receive) -> bytes:
        parts, more = [], True
        try:
            async with asyncio.timeout(self._timeout):
                while more:
                    message = await receive()
                    parts.append(message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError:
            raise Overloaded(408, f"the body did not arrive within {self._timeout} s", 1) from None
        return b"".join(parts)

    async def _answer(self, ask: Ask) -> Reply:
        stream = _STREAM.match(ask.path)
        if stream is not None:
            return await self._links[owner(stream[1], len(self._links))](ask)
        merge = _MERGES.get(ask.path)
        if merge is not None and ask.method == "GET":
            return merge(ask, await asyncio.gather(*(_tried(link, ask) for link in self._links)))
        return await self._from_any(ask)

    async def _from_any(self, ask: Ask) -> Reply:
        """Pages and descriptions are the same everywhere."""
        for link in self._links:
            reply = await _tried(link, ask)
            if isinstance(reply, Reply):
                return reply
        raise Overloaded(503, "no part of the server answers", 5)


async def _tried(link: Link, ask: Ask) -> Reply | Overloaded:
    try:
        return await link(ask)
    except Overloaded as error:
        return error


def _with_id(scope: Scope, request_id: str) -> Scope:
    """Let the part use the request's id of the front."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"x-request-id"]
    return {**scope, "headers": [*headers, (b"x-request-id", request_id.encode())]}
