"""HTTP/1.1 with limits that uvicorn does not have: time for a header, connections in total and from one address."""

import asyncio
import sys
from collections import Counter
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from dpl.serve.schemas import error_answer
from dpl.serve.settings import ServeSettings

__all__ = ["limited_protocol"]


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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time for the header, and close another connection if there are too many."""
        super().connection_made(transport)
        self._waiting_since = self.loop.time()
        self._deadline: asyncio.TimerHandle | None = None
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
            answer = error_answer(status, "the header is too long" if status == 431 else msg, "")
            headers = [*answer.raw_headers, (b"connection", b"close")]
            for event in (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def is_busy(self) -> bool:
        """Whether the client waits for a response; without a valid token it never does for long."""
        return self.cycle is not None and not self.cycle.response_started and not self.flow.write_paused

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
        waiting = [other for other in others if _address(other) == crowd and not other.is_busy]
        if waiting:
            min(waiting, key=lambda other: other._waiting_since).transport.abort()
        else:
            self.app_state = {**self.app_state, "surplus": True}


def _address(connection: Any) -> str:
    return connection.client[0] if connection.client else ""
