"""The HTTP interface as a page, from what a running server says about itself: OpenAPI document and metrics."""

import dataclasses
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from fastapi.testclient import TestClient

import dpl
from dpl.backbones import create
from dpl.data import square
from dpl.serve import create_app
from dpl.serve.settings import ServeSettings
from tools.markdown import escaped, render

__all__ = ["http_page"]

_SHAPE = (3, 32, 32)
_STATUS = {
    "401": "the token is missing or wrong",
    "403": "a browser sent the request from another site",
    "404": "no such stream, or the token does not cover it",
    "408": "the body arrived too slowly",
    "409": "the snapshot that the request needs is missing or damaged",
    "413": "the body is larger than `--max-body`",
    "422": "the images or options cannot be used; the message says why",
    "429": "too many requests, bytes or streams of this token, or requests for this stream; see `Retry-After`",
    "431": "the header is longer than `--max-header` or has too many fields",
    "503": "too many requests for the server, it is stopping, or storage fails or is slow; see `Retry-After`",
}
# What the OpenAPI document leaves out.
_MEANINGS = {
    "adapt": "`auto`: respond first if the method allows, then adapt; `wait`: adapt first; `off`: predict only",
    "top": "how many of the best classes to return for each image",
    "probabilities": "return the probabilities of all classes",
    "limit": "how many streams to return",
    "after": "return events after this `seq`",
    "multipart/form-data": "one or more image files in fields named `images`",
    "application/json": "`images`: list of base64 image files, or `arrays`: nested lists N,3,H,W",
}


def http_page() -> str:
    """Return the page of the HTTP interface as Markdown."""
    document, metrics = _ask()
    operations = [
        (path, method, about) for path, methods in document["paths"].items() for method, about in methods.items()
    ]
    schemas = sorted(document["components"]["schemas"].items())
    return render(
        "http.md.jinja",
        endpoints=[(f"`{method.upper()} {path}`", escaped(_about(about))) for path, method, about in operations],
        options=_options(operations),
        bodies=_bodies(operations),
        shapes=[(name, _about(shape), _fields(shape)) for name, shape in schemas if "Validation" not in name],
        statuses=list(_STATUS.items()),
        limits=_limits(),
        metrics=_metrics(metrics),
    )


def _ask() -> tuple[dict[str, Any], str]:
    """Return the OpenAPI document and the metrics of a server with one stream."""
    network = create("debug_cnn")
    with tempfile.TemporaryDirectory() as folder:
        settings = ServeSettings(state=Path(folder))
        app = create_app(lambda: dpl.adapt(network, "source"), square(_SHAPE[1]), _SHAPE, settings)
        with TestClient(app, base_url="http://127.0.0.1:8000") as client:
            headers = {"Content-Type": "application/octet-stream", "X-Shape": ",".join(map(str, (1, *_SHAPE)))}
            image = np.zeros((1, *_SHAPE), "<f4").tobytes()
            client.post("/v1/streams/example/predict", content=image, headers=headers).raise_for_status()
            return client.get("/openapi.json").json(), client.get("/metrics").text


def _about(part: dict[str, Any]) -> str:
    return str(part.get("description") or part.get("summary") or "").strip()


def _options(operations: list[tuple[str, str, dict[str, Any]]]) -> list[list[str]]:
    """Return the options of the query strings."""
    found = [(path, option) for path, _, about in operations for option in about.get("parameters", [])]
    return [
        [
            f"`{option['name']}`",
            f"`{path}`",
            f"`{option['schema'].get('default')}`",
            escaped(_about(option) or _MEANINGS.get(option["name"], "")),
        ]
        for path, option in found
        if option["in"] == "query"
    ]


def _bodies(operations: list[tuple[str, str, dict[str, Any]]]) -> list[list[str]]:
    """Return the content types that `predict` takes."""
    content = next(about["requestBody"]["content"] for path, _, about in operations if path.endswith("/predict"))
    return [
        [f"`{kind}`", escaped(_about(body.get("schema", {})) or _MEANINGS.get(kind, ""))]
        for kind, body in content.items()
    ]


def _fields(shape: dict[str, Any]) -> list[list[str]]:
    return [[f"`{name}`", _type(field), escaped(_about(field))] for name, field in shape.get("properties", {}).items()]


def _type(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type(option) for option in field["anyOf"])
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    kind = field.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(kind)
    return f"list of {_type(field['items'])}" if "items" in field else str(kind)


def _limits() -> list[list[str]]:
    known = [field for field in dataclasses.fields(ServeSettings) if "help" in field.metadata]
    return [[f"`--{field.name.replace('_', '-')}`", _default(field.default), field.metadata["help"]] for field in known]


def _default(value: Any) -> str:
    return f"{value:,}" if isinstance(value, (int, float)) else str(value)


def _metrics(text: str) -> list[list[str]]:
    """Return name, kind, labels and meaning of every metric in Prometheus' text format."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    helps = re.findall(r"^# HELP (dpl_\S+) (.*)$", text, re.MULTILINE)
    return [[f"`{name}`", kinds[name], meaning] for name, meaning in helps if not name.endswith("_created")]
