"""The web application: routes, and the way from a request through its stream's queue to the response."""

import asyncio
import base64
import hashlib
import os
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Annotated, Any

import yaml
from fastapi import Depends, FastAPI, Query, Request
from fastapi.utils import deep_dict_update
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import Response
from torch import Tensor

import dpl
from dpl.serve import schemas
from dpl.serve.decoding import Body
from dpl.serve.live import Act, AdaptChoice, Job, LiveModel
from dpl.serve.middleware import RequestFilter
from dpl.serve.schemas import Overloaded, SafeJSON
from dpl.serve.server import Server
from dpl.serve.store import check_stream_id

__all__ = ["make_app"]

_RUN = uuid.uuid4().hex[:12]  # another one after a restart, when numbers of jobs may be used again
_ERROR = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}}


def make_app(server: Server) -> FastAPI:
    """Return the application for a server; it closes the server when it ends."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(server.close)

    app = FastAPI(
        title="dpl serve",
        version=dpl.__version__,
        description="Predictions from a model that adapts to each stream of images.",
        docs_url=None,  # FastAPI's own pages load scripts from other sites
        redoc_url=None,
        lifespan=lifespan,
        default_response_class=SafeJSON,
        responses=dict.fromkeys((401, 404, 409, 413, 422, 429, 503), _ERROR),
    )
    app.add_middleware(RequestFilter, settings=server.settings, tokens=server.tokens, metrics=server.metrics)
    for kind in schemas.HANDLED:
        app.add_exception_handler(kind, schemas.handle_error)
    _add_routes(app, _Routes(server))
    deep_dict_update(app.openapi(), yaml.safe_load(files("dpl.serve").joinpath("api.yaml").read_text()))
    return app


def _add_routes(app: FastAPI, routes: "_Routes") -> None:
    one, model = "/v1/streams/{stream_id}", "/v2/models/{stream_id}"
    for method, path, handler in (
        ("POST", f"{one}/predict", routes.predict),
        ("GET", "/v1/streams", routes.list_streams),
        ("GET", one, routes.status),
        ("DELETE", one, routes.delete),
        ("GET", f"{one}/events", routes.events),
        ("POST", f"{one}/snapshot", routes.snapshot),
        ("POST", f"{one}/rollback", routes.rollback),
        ("POST", f"{one}/reset", routes.reset),
        ("POST", f"{model}/infer", routes.infer),
        ("GET", model, routes.model),
        ("GET", f"{model}/ready", routes.model),
        ("GET", "/v2", routes.protocol),
        ("GET", "/v2/health/live", routes.health),
        ("GET", "/v2/health/ready", routes.ready),
        ("GET", "/v1/server", routes.about),
        ("GET", "/metrics", routes.metrics),
        ("GET", "/healthz", routes.health),
        ("GET", "/readyz", routes.ready),
    ):
        app.add_api_route(path, handler, methods=[method])
    for path, name in (("/", "page.html"), ("/docs", "docs.html")):
        app.add_api_route(path, _page(name), include_in_schema=False)


async def _permitted(request: Request, stream_id: str) -> str:
    """Refuse an invalid stream name, and hide streams that the caller may not see."""
    check_stream_id(stream_id)
    if not stream_id.startswith(request.state.prefix):
        raise schemas.no_stream(stream_id)
    return stream_id


StreamId = Annotated[str, Depends(_permitted)]


class _Routes:
    """The handlers."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def predict(
        self,
        request: Request,
        stream_id: StreamId,
        adapt: AdaptChoice = "auto",
        top: Annotated[int, Query(ge=1, le=100)] = 1,
        probabilities: bool = False,
    ) -> Response:
        """Predict images and adapt the stream to them; a new name starts a new stream.

        `adapt=auto` responds first and then adapts, if the method allows it; `wait` responds after the adaptation;
        `off` only predicts.
        """
        kind, shape = request.headers.get("content-type", ""), request.headers.get("x-shape")
        images, _ = await self._decoded(request, kind, shape)
        act = partial(LiveModel.predict, images=images, adapt=adapt, top=top, probabilities=probabilities)
        return SafeJSON(await self._do(request, stream_id, act, create=True))

    async def infer(self, request: Request, stream_id: StreamId, adapt: AdaptChoice = "auto") -> Response:
        """Predict and adapt as `predict` does, for clients of the Open Inference Protocol; a stream is a model."""
        length = request.headers.get("inference-header-content-length")
        images, facts = await self._decoded(request, "application/json", length)
        act = partial(LiveModel.predict, images=images, adapt=adapt, probabilities=True)
        result = await self._do(request, stream_id, act, create=True)
        rows, outputs = result["predictions"], self._server.about["outputs"]
        values = [value for row in rows for value in row.get("probabilities") or [0.0] * outputs]
        labels = [-1 if row["class"] is None else row["class"] for row in rows]
        answer = {
            "model_name": stream_id,
            "id": result["request_id"],
            "parameters": {"seq": result["seq"], "adaptation": result["adaptation"]["status"]},
            "outputs": [
                {"name": "probabilities", "datatype": "FP32", "shape": [len(rows), outputs], "data": values},
                {"name": "class", "datatype": "INT64", "shape": [len(rows)], "data": labels},
            ],
        }
        return SafeJSON(answer | facts)

    async def model(self, stream_id: StreamId) -> Response:
        """Describe the model of a stream for clients of the Open Inference Protocol."""
        about = {
            "name": stream_id,
            "versions": [],
            "platform": "dpl",
            "inputs": [{"name": "images", "datatype": "FP32", "shape": [-1, *self._server.about["shape"]]}],
            "outputs": [
                {"name": "probabilities", "datatype": "FP32", "shape": [-1, self._server.about["outputs"]]},
                {"name": "class", "datatype": "INT64", "shape": [-1]},
            ],
        }
        return SafeJSON(about)

    async def protocol(self) -> Response:
        """Name the server for clients of the Open Inference Protocol."""
        return SafeJSON({"name": "dpl", "version": dpl.__version__, "extensions": ["binary_tensor_data"]})

    async def snapshot(self, request: Request, stream_id: StreamId) -> Response:
        """Write a snapshot of the stream to disk; manual snapshots are counted separately from automatic ones."""
        return SafeJSON(await self._do(request, stream_id, LiveModel.snapshot, needs_disk=True))

    async def rollback(
        self, request: Request, stream_id: StreamId, body: schemas.RollbackRequest | None = None
    ) -> Response:
        """Return to a snapshot: the newest one of an earlier state, or the one named by `to`."""
        act = partial(LiveModel.rollback, to=body.to if body else None)
        return SafeJSON(await self._do(request, stream_id, act))

    async def reset(self, request: Request, stream_id: StreamId) -> Response:
        """Return the stream to the source model, exactly."""
        return SafeJSON(await self._do(request, stream_id, LiveModel.reset))

    async def delete(self, request: Request, stream_id: StreamId) -> Response:
        """Delete the stream, in memory and on disk."""
        return SafeJSON(await self._do(request, stream_id, LiveModel.delete, needs_disk=True))

    async def status(self, stream_id: StreamId) -> Response:
        """Return the status of a stream."""
        status = self._server.find(stream_id).describe(self._server)
        snapshots = await asyncio.to_thread(self._server.store.snapshots, stream_id)
        return SafeJSON({**status, "snapshots": [snapshot.describe() for snapshot in snapshots]})

    async def events(self, stream_id: StreamId, after: int = 0) -> Response:
        """Return the most recent events of a stream."""
        events = [event for event in self._server.find(stream_id).events.copy() if event["seq"] > after]
        return SafeJSON({"stream": stream_id, "run": _RUN, "events": events})

    async def list_streams(self, request: Request, limit: Annotated[int, Query(ge=1, le=1_000)] = 100) -> Response:
        """List the streams, most recently used first."""
        streams = [stream for stream in self._server.streams() if stream.id.startswith(request.state.prefix)]
        streams.sort(key=lambda stream: stream.used, reverse=True)
        shown = [stream.describe(self._server) for stream in streams[:limit]]
        return SafeJSON({"streams": shown, "total": len(streams)})

    async def about(self) -> Response:
        """Return the model, how it adapts, and the limits."""
        limits = {key: value for key, value in vars(self._server.settings).items() if key != "state"}
        facts = {"run": _RUN, "process": os.getpid(), "version": dpl.__version__, "limits": limits}
        return SafeJSON({**self._server.about, **facts})

    async def metrics(self, request: Request) -> Response:
        """Return figures for Prometheus; only for tokens that may see every stream."""
        if request.state.prefix:
            raise HTTPException(404, "metrics are for tokens without a stream prefix")
        return Response(generate_latest(self._server.metrics.registry), media_type="text/plain; version=0.0.4")

    async def health(self) -> Response:
        """Return the problems of the server; the status is 200 while it responds to predictions."""
        problems = self._server.problems
        return SafeJSON({"status": "degraded" if problems else "ok", "problems": problems})

    async def ready(self) -> Response:
        """Return 200 while requests are accepted."""
        accepting = self._server.accepting
        return SafeJSON({"status": "ready" if accepting else "stopping"}, status_code=200 if accepting else 503)

    async def _decoded(self, request: Request, kind: str, shape: str | None) -> tuple[Tensor, dict[str, Any]]:
        """Let another process decode the body, in the time that a request has."""
        body, timeout = Body(kind, await request.body(), shape), self._server.settings.timeout
        try:
            async with asyncio.timeout(timeout):
                return await self._server.decoders.decode(request.state.prefix, body)
        except TimeoutError:
            raise Overloaded(503, f"not decoded within {timeout} s", 5) from None

    async def _do(
        self, request: Request, stream_id: str, act: Act, *, create: bool = False, needs_disk: bool = False
    ) -> dict[str, Any]:
        """Queue a job, wait for its result, then for what it writes; both no longer than `timeout`.

        If the request `needs_disk`, it fails if that cannot be written.
        """
        timeout, every = self._server.settings.timeout, self._server.settings.snapshot_every
        request_id = request.state.request_id
        job = Job(request_id, act)
        self._server.admit(stream_id, request.state.prefix, job, create=create)
        result = asyncio.wrap_future(job.future)
        try:
            await asyncio.wait({result}, timeout=timeout)
            if not result.done() and self._server.cancel(job):
                raise Overloaded(503, f"not started within {timeout} s", 5)
            done = await asyncio.shield(result)
            facts = {"request_id": request_id, "run": _RUN, "snapshot_every": every, **done}
            if job.written is not None:
                durable = await _is_written(job.written, needs_disk, timeout)
                facts |= {"durable": durable, "durable_through": job.stream.durable_through}
            return facts
        except asyncio.CancelledError:  # the client has left, or the time of a stop runs out
            self._server.cancel(job)
            if not self._server.accepting:
                raise Overloaded(503, "the server is stopping", 5) from None
            raise


async def _is_written(future: "Future[None]", needed: bool, timeout: float) -> bool:
    """Wait until what a job writes is on disk; raise an error if it is `needed` and is not."""
    written = asyncio.wrap_future(future)
    await asyncio.wait({written}, timeout=timeout)
    if needed and not written.done():
        raise Overloaded(503, f"the disk is slow: not written within {timeout} s; it follows", 10)
    if needed:
        written.result()
    return written.done() and written.exception() is None


def _page(name: str) -> Callable[[], Awaitable[Response]]:
    """Return a page in one file; its policy allows its own script and style, and nothing from other sites."""
    html = files("dpl.serve").joinpath(name).read_text()
    policy = "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    policy += "frame-ancestors 'none'"
    for tag, block in re.findall(r"<(script|style)>(.*?)</\1>", html, flags=re.DOTALL):
        policy += f"; {tag}-src 'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'"

    async def page() -> Response:
        return Response(html, media_type="text/html", headers={"Content-Security-Policy": policy})

    return page
