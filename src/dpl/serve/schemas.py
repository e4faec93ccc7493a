"""Requests and responses: their shapes, the status code of each error, and JSON that is always valid."""

import json
import math
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from dpl.core.errors import DataError, InputError, SnapshotError

__all__ = [
    "CLIENT_GONE", "HANDLED", "PREDICT_BODY", "ErrorAnswer", "Events", "JobDone", "NoStream", "Overloaded",
    "Prediction", "RollbackRequest", "SafeJSON", "StreamList", "StreamStatus", "error_answer", "handle_error",
]  # fmt: skip

CLIENT_GONE = 499  # nobody reads this response


class Overloaded(HTTPException):
    """A request that cannot be served now; the client should retry after some seconds."""

    def __init__(self, status: int, reason: str, retry_after: int) -> None:
        super().__init__(status, reason, {"Retry-After": str(retry_after)})


class NoStream(HTTPException):
    """A stream that does not exist, or that this caller may not see."""

    def __init__(self, stream_id: str) -> None:
        super().__init__(404, f"no stream {stream_id!r}")


class SafeJSON(Response):
    """JSON in which a number that is not finite is null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the document as bytes."""
        try:
            text = json.dumps(content, allow_nan=False, separators=(",", ":"))
        except ValueError:
            text = json.dumps(_without_nan(content), allow_nan=False, separators=(",", ":"))
        return text.encode()


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(part) for part in value]
    return value


def error_answer(status: int, message: str, request_id: str, headers: Mapping[str, str] | None = None) -> SafeJSON:
    """Return an error in the form that all errors have."""
    content = {"error": {"status": status, "message": message, "request_id": request_id}}
    return SafeJSON(content, status_code=status, headers=dict(headers or {}))


HANDLED = (HTTPException, RequestValidationError, OSError, InputError, DataError, SnapshotError, ClientDisconnect)


def handle_error(request: Request, error: Exception) -> SafeJSON:
    """Return the response for an error of one of the kinds in `HANDLED`."""
    status, message, headers = 422, str(error), {}
    if isinstance(error, HTTPException):
        status, message, headers = error.status_code, str(error.detail), dict(error.headers or {})
    elif isinstance(error, RequestValidationError):
        message = "; ".join(f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
    elif isinstance(error, OSError):
        status, message = 503, f"the state folder cannot be written: {error.strerror or error}"
        headers = {"Retry-After": "10"}
    elif isinstance(error, SnapshotError):
        status = 409
    elif isinstance(error, ClientDisconnect):
        status = CLIENT_GONE
    return error_answer(status, message, str(getattr(request.state, "request_id", "")), headers)


class RankedClass(BaseModel):
    """A class and its confidence."""

    label: int | None = Field(alias="class")
    name: str | None
    confidence: float | None


class PredictedImage(RankedClass):
    """The prediction for one image."""

    error: str | None = Field(
        None, description="why there is no prediction, for instance because the guard excluded the image"
    )
    top: list[RankedClass] | None = Field(None, description="with ?top=K")
    probabilities: list[float] | None = Field(None, description="with ?probabilities=true")


class Adaptation(BaseModel):
    """Whether the stream adapted to a batch."""

    status: str = Field(description="scheduled (follows this response), done, skipped or off")
    reason: str | None = Field(None, description="why the stream did not adapt")
    updated: bool | None = Field(None, description="with status done: whether a parameter changed")


class JobDone(BaseModel):
    """Facts in every response about a stream."""

    model_config = {"extra": "allow"}

    request_id: str
    stream: str
    seq: int = Field(description="number of this job in the stream")
    run: str = Field(
        description="changes when the server restarts; numbers above durable_through may then be used again"
    )
    durable_through: int = Field(description="a crash loses no adaptation up to this seq")
    snapshot_every: int = Field(description="adapted batches between two snapshots, which a crash can lose")


class Prediction(JobDone):
    """The response to a predict request."""

    predictions: list[PredictedImage]
    adaptation: Adaptation
    guard: dict[str, Any] = Field(description="what the guard did with the last adapted batch, and in total")


class StreamStatus(BaseModel):
    """The status of a stream."""

    stream: str
    seq: int
    version: int = Field(description="seq at which the present state was reached; 0 is the source model")
    durable_through: int
    snapshot_every: int
    unsaved_batches: int = Field(description="adapted batches that a crash would lose")
    images: int
    adapted_batches: int
    updates: int
    skipped_batches: int
    in_memory: bool
    waiting: int
    last_used: str
    confidence: float | None
    recent_confidence: list[float]
    distinct_classes: int
    class_balance: list[dict[str, Any]]
    drift: float = Field(description="relative change of the weights when last measured")
    last_adaptation: dict[str, Any]
    guard: dict[str, Any]
    snapshots: list[dict[str, Any]] | None = None


class StreamList(BaseModel):
    """Streams, most recently used first."""

    streams: list[StreamStatus]
    total: int


class Events(BaseModel):
    """Events of a stream, oldest first."""

    stream: str
    run: str
    events: list[dict[str, Any]]


class RollbackRequest(BaseModel):
    """The snapshot to roll back to."""

    model_config = {"extra": "forbid"}
    to: int | None = Field(None, ge=0, description="seq of a snapshot (default: the newest one of an earlier state)")


class ErrorAnswer(BaseModel):
    """The form of every error."""

    error: dict[str, Any]


_BASE64 = {"type": "object", "properties": {"images": {"type": "array", "items": {"type": "string", "format": "byte"}}}}
_ARRAYS = {"type": "object", "properties": {"arrays": {"type": "array", "description": "[N, 3, H, W], values in 0..1"}}}
PREDICT_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"images": {"type": "array", "items": {"type": "string", "format": "binary"}}},
                }
            },
            "application/json": {"schema": {"oneOf": [_BASE64, _ARRAYS]}},
            "application/octet-stream": {
                "schema": {
                    "type": "string",
                    "format": "binary",
                    "description": "little-endian float32; header X-Shape: N,3,H,W",
                }
            },
            "image/*": {"schema": {"type": "string", "format": "binary", "description": "one image file"}},
        },
    }
}
