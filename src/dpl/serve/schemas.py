"""The shapes of requests and answers, for the API's description."""

from typing import Any

from pydantic import BaseModel, Field

__all__ = ["PREDICT_BODY", "Done", "Events", "Failure", "Prediction", "RollbackRequest", "StreamList", "StreamStatus"]


class RankedClass(BaseModel):
    """A class and how sure the model is of it."""

    label: int | None = Field(alias="class")
    name: str | None
    confidence: float | None


class PredictedImage(RankedClass):
    """The answer for one image."""

    error: str | None = Field(None, description="why there is none: the guard has set the image aside")
    top: list[RankedClass] | None = Field(None, description="with ?top=K")
    probabilities: list[float] | None = Field(None, description="with ?probabilities=true")


class Adaptation(BaseModel):
    """What was, or will be, learned from a batch."""

    status: str = Field(description="scheduled (follows this answer), done, skipped or off")
    reason: str | None = Field(None, description="why there was none")
    updated: bool | None = Field(None, description="with status done: whether a parameter changed")


class Done(BaseModel):
    """What every answer about a stream carries."""

    request_id: str
    stream: str
    seq: int = Field(description="number of this act in the stream's history")
    run: str = Field(description="changes when the server restarts; numbers above durable_through may then come again")
    durable_through: int = Field(description="nothing learned up to this seq is lost in a crash")
    snapshot_every: int = Field(description="adapted batches between two snapshots: what a crash can cost")


class Prediction(Done):
    """The answer to a predict request."""

    predictions: list[PredictedImage]
    adaptation: Adaptation
    guard: dict[str, Any] = Field(description="what the guard did with the last adapted batch, and in all")


class StreamStatus(BaseModel):
    """How a stream goes."""

    stream: str
    seq: int
    version: int = Field(description="seq at which the present state came to be; 0 is the source model")
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
    drift: float = Field(description="relative change of the weights at the last look")
    last_adaptation: dict[str, Any]
    guard: dict[str, Any]
    snapshots: list[dict[str, Any]] | None = None


class StreamList(BaseModel):
    """Streams, the most recently used first."""

    streams: list[StreamStatus]
    total: int


class Events(BaseModel):
    """What happened in a stream, the oldest first."""

    stream: str
    run: str
    events: list[dict[str, Any]]


class RollbackRequest(BaseModel):
    """Where to roll back to."""

    model_config = {"extra": "forbid"}
    to: int | None = Field(None, ge=0, description="seq of a snapshot; without it the newest of an earlier state")


class Failure(BaseModel):
    """Every error."""

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
