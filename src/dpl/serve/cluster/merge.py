"""One answer made of the answers of all parts."""

import json
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from dpl.serve.answers import SafeJSON
from dpl.serve.cluster.relay import Ask, Reply
from dpl.serve.engine import Overloaded

__all__ = ["merged_health", "merged_metrics", "merged_server", "merged_streams"]

Given = Sequence[Reply | Overloaded]


def merged_streams(ask: Ask, given: Given) -> Reply:
    """All streams, the most recently used first; a part that does not answer makes the list incomplete and says so."""
    refused = _refused(given)
    if refused is not None:
        return refused
    lists = [json.loads(reply.body) for reply in given if isinstance(reply, Reply)]
    streams = sorted((s for part in lists for s in part["streams"]), key=lambda s: str(s["last_used"]), reverse=True)
    limit = int(parse_qs(ask.query.decode("latin-1")).get("limit", ["100"])[-1])
    content = {"streams": streams[:limit], "total": sum(part["total"] for part in lists)}
    return _document(content | ({"incomplete": True} if len(lists) < len(given) else {}))


def merged_server(_ask: Ask, given: Given) -> Reply:
    """What is served, which is the same everywhere, and the processes that do it."""
    refused = _refused(given)
    if refused is not None:
        return refused
    parts = [json.loads(reply.body) if isinstance(reply, Reply) else None for reply in given]
    first = next(part for part in parts if part is not None)
    replicas = [part and {"run": part["run"], "process": part["process"]} for part in parts]
    return _document({**first, "replicas": replicas})


def merged_health(ask: Ask, given: Given) -> Reply:
    """Well if all parts are; ready if all parts are."""
    parts = [json.loads(reply.body) if isinstance(reply, Reply) else None for reply in given]
    if ask.path == "/readyz":
        ready = all(isinstance(reply, Reply) and reply.status == 200 for reply in given)
        return _document({"status": "ready" if ready else "starting"}, 200 if ready else 503)
    problems = [
        f"replica {i}: {problem}"
        for i, part in enumerate(parts)
        for problem in (["does not answer; its streams wait"] if part is None else part["problems"])
    ]
    return _document({"status": "degraded" if problems else "ok", "problems": problems})


def merged_metrics(_ask: Ask, given: Given) -> Reply:
    """The figures of all parts, told apart by a label."""
    refused = _refused(given)
    if refused is not None:
        return refused
    registry = CollectorRegistry()
    registry.register(_Figures(given))
    text = generate_latest(registry)
    return Reply(200, ((b"content-type", b"text/plain; version=0.0.4"), (b"content-length", b"%d" % len(text))), text)


class _Figures(Collector):
    def __init__(self, given: Given) -> None:
        self._given = given

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for part, reply in enumerate(self._given):
            text = reply.body.decode() if isinstance(reply, Reply) else ""
            for family in text_string_to_metric_families(text):
                known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    known.add_sample(sample.name, {**sample.labels, "replica": str(part)}, sample.value)
        yield from families.values()


def _refused(given: Given) -> Reply | None:
    """Return the first answer that is an error, such as a missing token; raise when no part answers."""
    replies = [reply for reply in given if isinstance(reply, Reply)]
    if not replies:
        raise Overloaded(503, "no part of the server answers", 5)
    return next((reply for reply in replies if reply.status != 200), None)


def _document(content: Any, status: int = 200) -> Reply:
    response = SafeJSON(content, status_code=status)
    return Reply(status, tuple(response.raw_headers), bytes(response.body))
