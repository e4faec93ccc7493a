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

from fastapi import Depends, FastAPI, Query, Request
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import Response
from torch import Tensor

import dpl
from dpl.serve import live, schemas
from dpl.serve.decoding import INFER, Body
from dpl.serve.middleware import RequestFilter
from dpl.serve.schemas import NoStream, Overloaded, SafeJSON
from dpl.serve.server import Server
from dpl.serve.store import check_stream_id

__all__ = ["make_app"]

_RUN = uuid.uuid4().hex[:12]  # another one after a restart, when numbers of jobs may be used again


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
        responses={status: {"model": schemas.ErrorAnswer} for status in (401, 404, 409, 413, 422, 429, 503)},
    )
    app.add_middleware(RequestFilter, settings=server.settings, tokens=server.tokens, metrics=server.metrics)
    for kind in schemas.HANDLED:
        app.add_exception_handler(kind, schemas.handle_error)
    _add_routes(app, _Routes(server))
    return app


def _add_routes(app: FastAPI, routes: "_Routes") -> None:
    one = "/v1/streams/{stream_id}"
    app.add_api_route(f"{one}/predict", routes.predict, methods=["POST"], response_model=schemas.Prediction,
                      openapi_extra=schemas.PREDICT_BODY)  # fmt: skip
    for method, path, handler, model in (
        ("GET", "/v1/streams", routes.list_streams, schemas.StreamList),
        ("GET", one, routes.status, schemas.StreamStatus),
        ("GET", f"{one}/events", routes.events, schemas.Events),
        ("POST", f"{one}/snapshot", routes.snapshot, schemas.JobDone),
        ("POST", f"{one}/rollback", routes.rollback, schemas.JobDone),
        ("POST", f"{one}/reset", routes.reset, schemas.JobDone),
        ("DELETE", one, routes.delete, schemas.JobDone),
        ("POST", "/v2/models/{stream_id}/infer", routes.infer, None),
        ("GET", "/v2/models/{stream_id}", routes.model, None),
        ("GET", "/v2/models/{stream_id}/ready", routes.model, None),
        ("GET", "/v2", routes.protocol, None),
        ("GET", "/v2/health/live", routes.health, None),
        ("GET", "/v2/health/ready", routes.ready, None),
        ("GET", "/v1/server", routes.about, None),
        ("GET", "/metrics", routes.metrics, None),
        ("GET", "/healthz", routes.health, None),
        ("GET", "/readyz", routes.ready, None),
    ):
        app.add_api_route(path, handler, methods=[method], response_model=model)
    for path, name in (("/", "page.html"), ("/docs", "docs.html")):
        app.add_api_route(path, _page(name), include_in_schema=False)


async def _permitted(request: Request, stream_id: str) -> str:
    """Refuse an invalid stream name, and hide streams that the caller may not see."""
    check_stream_id(stream_id)
    if not stream_id.startswith(request.state.prefix):
        raise NoStream(stream_id)
    return stream_id


StreamId = Annotated[str, Depends(_permitted)]


class _Routes:
    """The handlers."""

    def __init__(self, server: Server) -> None:
        self._server, self._engine = server, server.engine

    async def predict(
        self,
        request: Request,
        stream_id: StreamId,
        adapt: live.AdaptChoice = "auto",
        top: Annotated[int, Query(ge=1, le=100)] = 1,
        probabilities: bool = False,
    ) -> Response:
        """Predict images and adapt the stream to them; a new name starts a new stream.

        `adapt=auto` responds first and then adapts, if the method allows it; `wait` responds after the adaptation;
        `off` only predicts.
        """
        kind, shape = request.headers.get("content-type", ""), request.headers.get("x-shape")
        images, _ = await self._decoded(request, kind, shape)
        act = partial(live.predict, images=images, adapt=adapt, top=top, probabilities=probabilities)
        return SafeJSON(await self._do(request, stream_id, act, create=True))

    async def infer(self, request: Request, stream_id: StreamId, adapt: live.AdaptChoice = "auto") -> Response:
        """Predict and adapt as `predict` does, for clients of the Open Inference Protocol; a stream is a model."""
        images, facts = await self._decoded(request, INFER, request.headers.get("inference-header-content-length"))
        act = partial(live.predict, images=images, adapt=adapt, probabilities=True)
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
        return SafeJSON(await self._do(request, stream_id, live.snapshot, needs_disk=True))

    async def rollback(
        self, request: Request, stream_id: StreamId, body: schemas.RollbackRequest | None = None
    ) -> Response:
        """Return to a snapshot: the newest one of an earlier state, or the one named by `to`."""
        act = partial(live.rollback, to=body.to if body else None)
        return SafeJSON(await self._do(request, stream_id, act))

    async def reset(self, request: Request, stream_id: StreamId) -> Response:
        """Return the stream to the source model, exactly."""
        return SafeJSON(await self._do(request, stream_id, live.reset))

    async def delete(self, request: Request, stream_id: StreamId) -> Response:
        """Delete the stream, in memory and on disk."""
        return SafeJSON(await self._do(request, stream_id, live.delete, needs_disk=True))

    async def status(self, stream_id: StreamId) -> Response:
        """Return the status of a stream."""
        status = self._engine.find(stream_id).describe(self._server)
        names = await asyncio.to_thread(self._server.store.names, stream_id)
        return SafeJSON({**status, "snapshots": [name._asdict() for name in names]})

    async def events(self, stream_id: StreamId, after: int = 0) -> Response:
        """Return the most recent events of a stream."""
        return SafeJSON({"stream": stream_id, "run": _RUN, "events": self._engine.find(stream_id).events(after)})

    async def list_streams(self, request: Request, limit: Annotated[int, Query(ge=1, le=1_000)] = 100) -> Response:
        """List the streams, most recently used first."""
        streams = [stream for stream in self._engine.streams() if stream.id.startswith(request.state.prefix)]
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
        accepting = self._engine.accepting
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
        self, request: Request, stream_id: str, act: live.Act, *, create: bool = False, needs_disk: bool = False
    ) -> dict[str, Any]:
        """Queue a job, wait for its result, then for what it writes; both no longer than `timeout`.

        If the request `needs_disk`, it fails if that cannot be written.
        """
        timeout, every = self._server.settings.timeout, self._server.settings.snapshot_every
        request_id = request.state.request_id
        job = live.Job(request_id, act)
        with self._engine.admit(stream_id, request.state.prefix, job, create=create) as stream:
            result = asyncio.wrap_future(job.future)
            try:
                await asyncio.wait({result}, timeout=timeout)
                if not result.done() and self._engine.cancel(stream, job):
                    raise Overloaded(503, f"not started within {timeout} s", 5)
                await asyncio.wait({result})
                facts = {"request_id": request_id, "run": _RUN, "snapshot_every": every, **result.result()}
                if job.written is not None:
                    durable = await _is_written(job.written, needs_disk, timeout)
                    facts |= {"durable": durable, "durable_through": stream.durable_through}
            except asyncio.CancelledError:  # the client has left, or the time of a stop runs out
                dropped = self._engine.cancel(stream, job)
                if not self._engine.accepting:
                    raise Overloaded(503, "the server is stopping", 5) from None
                if not dropped:
                    await asyncio.wait({result})
                raise
        return facts


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
    hashes = []
    for tag in ("script", "style"):
        (block,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
        hashes.append(base64.b64encode(hashlib.sha256(block.encode()).digest()).decode())
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    async def page() -> Response:
        return Response(html, media_type="text/html", headers={"Content-Security-Policy": policy})

    return page
