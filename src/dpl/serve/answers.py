"""Answers that are always valid JSON, and the status that each kind of error becomes."""

import json
import math
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from dpl.core.errors import DataError, InputError, SnapshotError
from dpl.serve.engine import Overloaded

__all__ = ["GONE", "BodyTooLarge", "NoStream", "SafeJSON", "error_answer", "handle"]


GONE = 499  # the client has left; nobody reads this answer


class BodyTooLarge(Exception):  # noqa: N818 - the state of a request, not of the program
    """A body that exceeds the limit, noticed while it is read."""


class NoStream(Exception):  # noqa: N818
    """A stream that does not exist, or not for this caller."""


class SafeJSON(Response):
    """JSON as the standard has it: a number that is not finite becomes null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the document as bytes."""
        try:
            text = json.dumps(content, allow_nan=False, separators=(",", ":"))
        except ValueError:
            text = json.dumps(_without_nan(content), allow_nan=False, separators=(",", ":"))
        return text.encode()


def error_answer(status: int, message: str, request_id: str, headers: Mapping[str, str] | None = None) -> SafeJSON:
    """Return an error in the one form that all errors have."""
    content = {"error": {"status": status, "message": message, "request_id": request_id}}
    return SafeJSON(content, status_code=status, headers=dict(headers or {}))


def handle(request: Request, error: Exception) -> SafeJSON:
    """Answer an error that was raised on purpose."""
    request_id = str(getattr(request.state, "request_id", ""))
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded):
        status, message, headers = error.status, str(error), {"Retry-After": str(error.retry_after)}
    elif isinstance(error, RequestValidationError):
        status, message = 422, "; ".join(f"{_where(part)}: {part['msg']}" for part in error.errors())
    elif isinstance(error, HTTPException):
        status, message, headers = error.status_code, str(error.detail), dict(error.headers or {})
    elif isinstance(error, OSError):
        status, message = 503, f"the state folder cannot be written: {error.strerror or error}"
        headers = {"Retry-After": "10"}
    else:
        status, message = _status(error), str(error)
    return error_answer(status, message, request_id, headers)


def _status(error: Exception) -> int:
    table: list[tuple[type[Exception], int]] = [
        (InputError, 422),
        (DataError, 422),
        (SnapshotError, 409),
        (BodyTooLarge, 413),
        (NoStream, 404),
        (ClientDisconnect, GONE),
    ]
    return next(status for kind, status in table if isinstance(error, kind))


HANDLED = (Overloaded, RequestValidationError, HTTPException, OSError, InputError, DataError, SnapshotError,
           BodyTooLarge, NoStream, ClientDisconnect)  # fmt: skip


def _where(part: Mapping[str, Any]) -> str:
    return ".".join(str(step) for step in part["loc"])


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(part) for part in value]
    return value
