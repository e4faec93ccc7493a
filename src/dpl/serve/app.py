"""The web application: routes, and the way from a request through its stream's queue to the response."""

import asyncio
import base64
import hashlib
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import Response
from torch import Tensor

import dpl
from dpl.serve import schemas
from dpl.serve.images import INFER, Body
from dpl.serve.jobs import RUN, AdaptChoice, Delete, Job, Predict, Reset, Rollback, Snapshot
from dpl.serve.middleware import RequestFilter, check_stream_id
from dpl.serve.schemas import NoStream, Overloaded, SafeJSON
from dpl.serve.server import Server

__all__ = ["make_app"]


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
        job = Predict(request.state.request_id, images, adapt, top, probabilities)
        return SafeJSON(await self._do(request, stream_id, job, create=True))

    async def infer(self, request: Request, stream_id: StreamId, adapt: AdaptChoice = "auto") -> Response:
        """Predict and adapt as `predict` does, for clients of the Open Inference Protocol; a stream is a model."""
        images, facts = await self._decoded(request, INFER, request.headers.get("inference-header-content-length"))
        job = Predict(request.state.request_id, images, adapt, probabilities=True)
        result = await self._do(request, stream_id, job, create=True)
        return SafeJSON(schemas.infer_answer(stream_id, result, self._server.about["outputs"]) | facts)

    async def model(self, stream_id: StreamId) -> Response:
        """Describe the model of a stream for clients of the Open Inference Protocol."""
        return SafeJSON(schemas.model_answer(stream_id, self._server.about))

    async def protocol(self) -> Response:
        """Name the server for clients of the Open Inference Protocol."""
        return SafeJSON({"name": "dpl", "version": dpl.__version__, "extensions": ["binary_tensor_data"]})

    async def snapshot(self, request: Request, stream_id: StreamId) -> Response:
        """Write a snapshot of the stream to disk; manual snapshots are counted separately from automatic ones."""
        return SafeJSON(await self._do(request, stream_id, Snapshot(request.state.request_id)))

    async def rollback(
        self, request: Request, stream_id: StreamId, body: schemas.RollbackRequest | None = None
    ) -> Response:
        """Return to a snapshot: the newest one of an earlier state, or the one named by `to`."""
        job = Rollback(request.state.request_id, body.to if body else None)
        return SafeJSON(await self._do(request, stream_id, job))

    async def reset(self, request: Request, stream_id: StreamId) -> Response:
        """Return the stream to the source model, exactly."""
        return SafeJSON(await self._do(request, stream_id, Reset(request.state.request_id)))

    async def delete(self, request: Request, stream_id: StreamId) -> Response:
        """Delete the stream, in memory and on disk."""
        return SafeJSON(await self._do(request, stream_id, Delete(request.state.request_id)))

    async def status(self, stream_id: StreamId) -> Response:
        """Return the status of a stream."""
        status = self._engine.describe(self._engine.find(stream_id))
        names = await asyncio.to_thread(self._engine.context.store.names, stream_id)
        return SafeJSON({**status, "snapshots": [name._asdict() for name in names]})

    async def events(self, stream_id: StreamId, after: int = 0) -> Response:
        """Return the most recent events of a stream."""
        return SafeJSON({"stream": stream_id, "run": RUN, "events": self._engine.find(stream_id).events(after)})

    async def list_streams(self, request: Request, limit: Annotated[int, Query(ge=1, le=1_000)] = 100) -> Response:
        """List the streams, most recently used first."""
        streams = [stream for stream in self._engine.streams() if stream.id.startswith(request.state.prefix)]
        streams.sort(key=lambda stream: stream.used, reverse=True)
        return SafeJSON({"streams": [*map(self._engine.describe, streams[:limit])], "total": len(streams)})

    async def about(self) -> Response:
        """Return the model, how it adapts, and the limits."""
        limits = {key: value for key, value in vars(self._server.settings).items() if key != "state"}
        facts = {"run": RUN, "process": os.getpid(), "version": dpl.__version__, "limits": limits}
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

    async def _do(self, request: Request, stream_id: str, job: Job, *, create: bool = False) -> dict[str, Any]:
        """Queue a job, wait for its result, then for what it writes; both no longer than `timeout`."""
        timeout = self._server.settings.timeout
        with self._engine.admit(stream_id, request.state.prefix, create=create) as stream:
            self._engine.submit(stream, job)
            result = asyncio.wrap_future(job.future)
            try:
                await asyncio.wait({result}, timeout=timeout)
                if not result.done() and self._engine.cancel(stream, job):
                    raise Overloaded(503, f"not started within {timeout} s", 5)
                await asyncio.wait({result})
                facts = result.result()
                if job.written is not None:
                    durable = await _is_written(job.written, job.needs_disk, timeout)
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
    if not written.done():
        if needed:
            raise Overloaded(503, f"the disk is slow: not written within {timeout} s; it follows", 10)
        return False
    if needed:
        written.result()
    return written.exception() is None


def _page(name: str) -> Callable[[], Awaitable[Response]]:
    """Return a page in one file; its policy allows its own script and style, and nothing from other sites."""
    html = files("dpl.serve").joinpath(name).read_text()
    script, style = _hash(html, "script"), _hash(html, "style")
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    async def page() -> Response:
        return Response(html, media_type="text/html", headers={"Content-Security-Policy": policy})

    return page


def _hash(html: str, tag: str) -> str:
    (block,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'"
