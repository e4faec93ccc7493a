"""Requests and responses: their shapes, the status code of each error, and JSON that is always valid."""

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dpl.core.errors import DataError, InputError, SnapshotError

__all__ = [
    "HANDLED", "PREDICT_BODY", "ErrorAnswer", "Events", "JobDone", "NoStream", "Overloaded", "Prediction",
    "RollbackRequest", "SafeJSON", "StreamList", "StreamStatus", "error_answer", "handle_error",
]  # fmt: skip


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
        return to_json(content, inf_nan_mode="null")


def error_answer(status: int, message: str, request_id: str, headers: Mapping[str, str] | None = None) -> SafeJSON:
    """Return an error in the form that all errors have."""
    content = {"error": {"status": status, "message": message, "request_id": request_id}}
    return SafeJSON(content, status_code=status, headers=dict(headers or {}))


HANDLED = (HTTPException, RequestValidationError, OSError, InputError, DataError, SnapshotError)


def handle_error(request: Request, error: Exception) -> SafeJSON:
    """Return the response for an error of one of the kinds in `HANDLED`."""
    status, message = 409 if isinstance(error, SnapshotError) else 422, str(error)
    if isinstance(error, RequestValidationError):
        message = "; ".join(f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
    elif isinstance(error, OSError):
        error = Overloaded(503, f"the state folder cannot be written: {error.strerror or error}", 10)
    headers = None
    if isinstance(error, HTTPException):
        status, message, headers = error.status_code, str(error.detail), error.headers
    return error_answer(status, message, str(getattr(request.state, "request_id", "")), headers)


class Adaptation(BaseModel):
    """Whether the stream adapted to a batch."""

    status: str = Field(description="scheduled (follows this response), done, skipped or off")
    reason: str | None = Field(None, description="why the stream did not adapt")
    updated: bool | None = Field(None, description="with status done: whether a parameter changed")


class PredictedImage(BaseModel):
    """The prediction for one image."""

    label: int | None = Field(alias="class")
    name: str | None
    confidence: float | None
    error: str | None = Field(None, description="why there is no prediction; the guard may have excluded the image")
    top: list[dict[str, Any]] | None = Field(None, description="with ?top=K: class, name and confidence of each")
    probabilities: list[float] | None = Field(None, description="with ?probabilities=true")


class JobDone(BaseModel):
    """Facts in every response about a stream."""

    model_config = {"extra": "allow"}

    request_id: str
    stream: str
    seq: int = Field(description="number of this job in the stream")
    run: str = Field(description="changes at a restart; numbers above durable_through may then be used again")
    durable_through: int = Field(description="a crash loses no adaptation up to this seq")
    snapshot_every: int = Field(description="adapted batches between two snapshots, which a crash can lose")


class Prediction(JobDone):
    """The response to a predict request."""

    predictions: list[PredictedImage]
    adaptation: Adaptation
    guard: dict[str, Any] = Field(description="what the guard did with the last adapted batch, and in total")


class StreamStatus(BaseModel):
    """The status of a stream; the response has some more."""

    model_config = {"extra": "allow"}

    stream: str
    seq: int
    version: int = Field(description="seq at which the present state was reached; 0 is the source model")
    durable_through: int
    unsaved_batches: int = Field(description="adapted batches that a crash would lose")
    adapted_batches: int = Field(description="batches that changed a parameter")
    skipped_batches: int = Field(description="batches not adapted to because of load or storage")
    confidence: float | None = Field(description="mean confidence of the last batch")
    drift: float = Field(description="relative change of the weights when last measured")
    last_adaptation: dict[str, Any]
    guard: dict[str, Any]
    estimate: dict[str, Any] | None = Field(description="accuracy without labels, in percent; with --calibrate")
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


_LIST = {"type": "array", "items": {"type": "string", "format": "byte"}}
_FILE = {"type": "string", "format": "binary"}
_BODIES: dict[str, dict[str, Any]] = {
    "multipart/form-data": {"type": "object", "properties": {"images": {"type": "array", "items": _FILE}}},
    "application/json": {"type": "object", "properties": {"images": _LIST, "arrays": {"type": "array"}}},
    "application/octet-stream": {**_FILE, "description": "little-endian float32; header X-Shape: N,3,H,W"},
    "image/*": {**_FILE, "description": "one image file"},
}
PREDICT_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {kind: {"schema": schema} for kind, schema in _BODIES.items()}}
}
