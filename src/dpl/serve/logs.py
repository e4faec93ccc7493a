"""Log lines that name their stream, as text or as JSON."""

import json
import logging
from contextvars import ContextVar

__all__ = ["CURRENT", "configure_logging"]

CURRENT: ContextVar[str | None] = ContextVar("stream", default=None)  # the stream that this thread works on


def _name_stream(record: logging.LogRecord) -> bool:
    """Add the stream; the guard and the methods do not know it."""
    stream = getattr(record, "stream", None) or CURRENT.get()
    vars(record).update(stream=stream, subject=f"stream {stream}: " if stream else "")
    return True


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return one JSON document in one line."""
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "stream": getattr(record, "stream", None),
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure_logging(form: str) -> None:
    """Write the log to standard error, as `text` or `json`."""
    handler = logging.StreamHandler()
    handler.addFilter(_name_stream)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(subject)s%(message)s")
    handler.setFormatter(_JsonLines() if form == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
