"""The web application: routes, and the way from a request through its stream's queue to the response."""

import asyncio
import base64
import hashlib
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import Response
from torch import Tensor

import dpl
from dpl.core.errors import InputError
from dpl.serve.jobs import RUN, AdaptChoice, Delete, Job, Predict, Reset, Rollback, Snapshot, describe_snapshot
from dpl.serve.middleware import EVERYTHING, Access, FilterRules, RequestFilter, check_stream_id
from dpl.serve.schemas import (
    CLIENT_GONE,
    HANDLED,
    PREDICT_BODY,
    ErrorAnswer,
    Events,
    JobDone,
    NoStream,
    Overloaded,
    Prediction,
    RollbackRequest,
    SafeJSON,
    StreamList,
    StreamStatus,
    handle_error,
)
from dpl.serve.server import Server
from dpl.serve.stream import Stream

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
    )
    settings = server.settings
    rules = FilterRules(settings.max_body, settings.timeout, server.tokens, server.metrics)
    app.add_middleware(RequestFilter, rules=rules)
    for kind in HANDLED:
        app.add_exception_handler(kind, handle_error)
    _add_routes(app, _Routes(server))
    return app


def _add_routes(app: FastAPI, routes: "_Routes") -> None:
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorAnswer} for status in (401, 404, 409, 413, 422, 429, 503)
    }
    one = "/v1/streams/{stream_id}"
    table: list[tuple[str, str, Any, type | None, dict[str, Any]]] = [
        ("POST", f"{one}/predict", routes.predict, Prediction, {"openapi_extra": PREDICT_BODY}),
        ("GET", "/v1/streams", routes.list_streams, StreamList, {}),
        ("GET", one, routes.status, StreamStatus, {}),
        ("GET", f"{one}/events", routes.events, Events, {}),
        ("POST", f"{one}/snapshot", routes.snapshot, JobDone, {}),
        ("POST", f"{one}/rollback", routes.rollback, JobDone, {}),
        ("POST", f"{one}/reset", routes.reset, JobDone, {}),
        ("DELETE", one, routes.delete, JobDone, {}),
        ("GET", "/v1/server", routes.about, None, {}),
        ("GET", "/metrics", routes.metrics, None, {}),
        ("GET", "/healthz", routes.health, None, {}),
        ("GET", "/readyz", routes.ready, None, {}),
    ]
    for method, path, handler, model, extra in table:
        app.add_api_route(path, handler, methods=[method], response_model=model, responses=errors, **extra)
    for path, name in (("/", "page.html"), ("/docs", "docs.html")):
        app.add_api_route(path, _Page(name), methods=["GET"], include_in_schema=False)


async def _permitted(request: Request, stream_id: str) -> str:
    """Refuse an invalid stream name, and hide streams that the caller may not see."""
    check_stream_id(stream_id)
    if not request.state.access.allows(stream_id):
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
        with self._engine.admit(stream_id, create=True) as stream:
            images = await self._read(request)
            job = Predict(request.state.request_id, images, adapt, top, probabilities)
            return await self._complete(request, stream, job)

    async def snapshot(self, request: Request, stream_id: StreamId) -> Response:
        """Write a snapshot of the stream to disk; manual snapshots are counted separately from automatic ones."""
        return await self._do(request, stream_id, Snapshot(request.state.request_id))

    async def rollback(self, request: Request, stream_id: StreamId, body: RollbackRequest | None = None) -> Response:
        """Return to a snapshot: the newest one of an earlier state, or the one named by `to`."""
        return await self._do(request, stream_id, Rollback(request.state.request_id, body.to if body else None))

    async def reset(self, request: Request, stream_id: StreamId) -> Response:
        """Return the stream to the source model, exactly."""
        return await self._do(request, stream_id, Reset(request.state.request_id))

    async def delete(self, request: Request, stream_id: StreamId) -> Response:
        """Delete the stream, in memory and on disk."""
        return await self._do(request, stream_id, Delete(request.state.request_id))

    async def status(self, stream_id: StreamId) -> Response:
        """Return the status of a stream."""
        stream = self._engine.find(stream_id)
        names = await asyncio.to_thread(self._engine.context.store.names, stream_id)
        return SafeJSON({**(await self._describe([stream]))[0], "snapshots": [*map(describe_snapshot, names)]})

    async def events(self, stream_id: StreamId, after: int = 0) -> Response:
        """Return the most recent events of a stream."""
        return SafeJSON({"stream": stream_id, "run": RUN, "events": self._engine.find(stream_id).events(after)})

    async def list_streams(self, request: Request, limit: Annotated[int, Query(ge=1, le=10_000)] = 100) -> Response:
        """List the streams, most recently used first."""
        access: Access = request.state.access
        streams = [stream for stream in self._engine.streams() if access.allows(stream.id)]
        streams.sort(key=lambda stream: stream.used, reverse=True)
        return SafeJSON({"streams": await self._describe(streams[:limit]), "total": len(streams)})

    async def about(self) -> Response:
        """Return the model, how it adapts, and the limits."""
        limits = {key: value for key, value in vars(self._server.settings).items() if key != "state"}
        facts = {"run": RUN, "process": os.getpid(), "version": dpl.__version__, "limits": limits}
        return SafeJSON({**self._server.about, **facts})

    async def metrics(self, request: Request) -> Response:
        """Return figures for Prometheus; only for tokens that may see every stream."""
        if request.state.access != EVERYTHING:
            raise HTTPException(404, "metrics are for tokens without a stream prefix")
        return Response(self._server.metrics.text(), media_type="text/plain; version=0.0.4")

    async def health(self) -> Response:
        """Return the problems of the server; the status is 200 while it responds to predictions."""
        problems = self._server.problems
        return SafeJSON({"status": "degraded" if problems else "ok", "problems": problems})

    async def ready(self) -> Response:
        """Return 200 while requests are accepted."""
        accepting = self._engine.accepting
        return SafeJSON({"status": "ready" if accepting else "stopping"}, status_code=200 if accepting else 503)

    async def _do(self, request: Request, stream_id: str, job: Job) -> Response:
        await request.body()
        with self._engine.admit(stream_id) as stream:
            return await self._complete(request, stream, job)

    async def _complete(self, request: Request, stream: Stream, job: Job) -> Response:
        """Queue a job and wait for its response; cancel it if the client disconnects or the time is over."""
        self._engine.submit(stream, job)
        result = asyncio.wrap_future(job.future)
        disconnected: asyncio.Future[Any] = asyncio.ensure_future(_disconnection(request))
        timeout = self._server.settings.timeout
        try:
            await asyncio.wait({result, disconnected}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            is_gone = disconnected.done()
        except asyncio.CancelledError:
            self._engine.cancel(stream, job)
            raise
        finally:
            disconnected.cancel()
        if not result.done() and self._engine.cancel(stream, job):
            if is_gone:
                return Response(status_code=CLIENT_GONE)
            raise Overloaded(503, f"not started within {timeout} s", 5)
        return SafeJSON(await result)

    async def _read(self, request: Request) -> Tensor:
        """Read the images of a request; threads of their own decode them."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        decoder, threads, loop = self._server.decoder, self._server.decoding, asyncio.get_running_loop()
        if kind == "multipart/form-data":
            return await loop.run_in_executor(threads, decoder.from_files, await self._files(request))
        body, shape = await request.body(), request.headers.get("x-shape")
        return await loop.run_in_executor(threads, decoder.from_body, kind, body, shape)

    async def _files(self, request: Request) -> list[bytes]:
        limit = self._server.settings.max_batch
        async with request.form(max_files=limit, max_fields=limit) as form:
            parts = [part for _, part in form.multi_items()]
            if any(not isinstance(part, UploadFile) for part in parts):
                raise InputError("the form has fields that are no files; expected image files only")
            return [await part.read() for part in parts if isinstance(part, UploadFile)]

    async def _describe(self, streams: list[Stream]) -> list[dict[str, Any]]:
        for stream in streams:
            if stream.unread and not stream.images:
                await asyncio.to_thread(self._engine.read_counts, stream)
        names, every = self._engine.context.names, self._server.settings.snapshot_every
        return [stream.describe(names, every) for stream in streams]


class _Page:
    """A page in one file; its policy allows its own script and style, and nothing from other sites."""

    def __init__(self, name: str) -> None:
        self._html = files("dpl.serve").joinpath(name).read_text()
        allowed = {tag: _hash(self._html, tag) for tag in ("script", "style")}
        self._policy = (
            f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

    async def __call__(self) -> Response:
        return Response(self._html, media_type="text/html", headers={"Content-Security-Policy": self._policy})


def _hash(html: str, tag: str) -> str:
    blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(block.encode()).digest()).decode() for block in blocks]
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


async def _disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
