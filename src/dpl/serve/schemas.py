"""Requests and responses: the status code of each error, and JSON that is always valid."""

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dpl.core.errors import DataError, InputError, SnapshotError

__all__ = ["HANDLED", "Overloaded", "RollbackRequest", "SafeJSON", "error_answer", "handle_error", "no_stream"]

HANDLED = (HTTPException, RequestValidationError, OSError, InputError, DataError, SnapshotError)


class Overloaded(HTTPException):
    """A request that cannot be served now; the client should retry after some seconds."""

    def __init__(self, status: int, reason: str, retry_after: int) -> None:
        super().__init__(status, reason, {"Retry-After": str(retry_after)})


def no_stream(stream_id: str) -> HTTPException:
    """Return the error for a stream that does not exist, or that this caller may not see."""
    return HTTPException(404, f"no stream {stream_id!r}")


class RollbackRequest(BaseModel):
    """The snapshot to roll back to."""

    model_config = {"extra": "forbid"}
    to: int | None = Field(None, ge=0, description="seq of a snapshot (default: the newest one of an earlier state)")


class SafeJSON(Response):
    """JSON in which a number that is not finite is null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the document as bytes."""
        return to_json(content, inf_nan_mode="null")


def error_answer(status: int, message: str, request_id: str, headers: Mapping[str, str] | None = None) -> SafeJSON:
    """Return an error in the form that all errors have."""
    content = {"error": {"status": status, "message": message, "request_id": request_id}}
    return SafeJSON(content, status_code=status, headers=dict(headers or {}))


def handle_error(request: Request, error: Exception) -> SafeJSON:
    """Return the response for an error of one of the kinds in `HANDLED`."""
    if isinstance(error, RequestValidationError):
        parts = [f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors()]
        error = HTTPException(422, "; ".join(parts))
    elif isinstance(error, OSError):
        error = Overloaded(503, f"the state folder cannot be written: {error.strerror or error}", 10)
    elif not isinstance(error, HTTPException):
        error = HTTPException(409 if isinstance(error, SnapshotError) else 422, str(error))
    request_id = getattr(request.state, "request_id", "")
    return error_answer(error.status_code, str(error.detail), request_id, error.headers)
