"""The web application: routes, and the way from a request through its stream's queue to the answer."""

import asyncio
import base64
import hashlib
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.responses import Response
from torch import Tensor

import dpl
from dpl.core.errors import InputError
from dpl.serve.answers import GONE, HANDLED, NoStream, SafeJSON, handle
from dpl.serve.engine import Overloaded
from dpl.serve.gate import Gate, GateRules
from dpl.serve.jobs import RUN, AdaptChoice, Delete, Job, Predict, Reset, Rollback, Snapshot
from dpl.serve.schemas import PREDICT_BODY, Done, Events, Failure, Prediction, RollbackRequest, StreamList, StreamStatus
from dpl.serve.security import OPEN, Access, check_stream_id
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
        docs_url=None,  # the usual page loads scripts from elsewhere; ours is self-contained
        redoc_url=None,
        lifespan=lifespan,
        default_response_class=SafeJSON,
    )
    app.add_middleware(Gate, rules=GateRules(server.settings.max_body, server.tokens, server.metrics))
    for kind in HANDLED:
        app.add_exception_handler(kind, handle)
    _add_routes(app, _Routes(server))
    return app


def _add_routes(app: FastAPI, routes: "_Routes") -> None:
    failures: dict[int | str, dict[str, Any]] = {
        status: {"model": Failure} for status in (401, 404, 409, 413, 422, 429, 503)
    }
    one = "/v1/streams/{stream_id}"
    table: list[tuple[str, str, Any, type | None, dict[str, Any]]] = [
        ("POST", f"{one}/predict", routes.predict, Prediction, {"openapi_extra": PREDICT_BODY}),
        ("GET", "/v1/streams", routes.list_streams, StreamList, {}),
        ("GET", one, routes.status, StreamStatus, {}),
        ("GET", f"{one}/events", routes.events, Events, {}),
        ("POST", f"{one}/snapshot", routes.snapshot, Done, {}),
        ("POST", f"{one}/rollback", routes.rollback, Done, {"openapi_extra": _body_of(RollbackRequest)}),
        ("POST", f"{one}/reset", routes.reset, Done, {}),
        ("DELETE", one, routes.delete, Done, {}),
        ("GET", "/v1/server", routes.about, None, {}),
        ("GET", "/metrics", routes.metrics, None, {}),
        ("GET", "/healthz", routes.health, None, {}),
        ("GET", "/readyz", routes.ready, None, {}),
    ]
    for method, path, handler, model, extra in table:
        app.add_api_route(path, handler, methods=[method], response_model=model, responses=failures, **extra)
    for path, name in (("/", "page.html"), ("/docs", "docs.html")):
        app.add_api_route(path, _Page(name), methods=["GET"], include_in_schema=False)


class _Routes:
    """The handlers."""

    def __init__(self, server: Server) -> None:
        self._server, self._engine = server, server.engine

    async def predict(
        self,
        request: Request,
        stream_id: str,
        adapt: AdaptChoice = "auto",
        top: Annotated[int, Query(ge=1, le=100)] = 1,
        probabilities: bool = False,
    ) -> Response:
        """Predict images and adapt the stream to them; a new name starts a new stream.

        `adapt=auto` answers first and adapts afterwards where the method allows; `wait` answers after the adaptation;
        `off` only predicts.
        """
        _permit(request, stream_id)
        with self._engine.admit(stream_id, create=True) as stream:
            images = await self._read(request)
            job = Predict(request.state.request_id, images, adapt, top, probabilities)
            return await self._complete(request, stream, job)

    async def snapshot(self, request: Request, stream_id: str) -> Response:
        """Put the stream's state on the disk; manual snapshots are kept apart from the automatic ones."""
        return await self._do(request, stream_id, Snapshot(request.state.request_id))

    async def rollback(self, request: Request, stream_id: str) -> Response:
        """Return to a snapshot: to the newest one of an earlier state, or to the one named by `to`."""
        body = await self._body(request)
        try:
            to = RollbackRequest.model_validate_json(body).to if body.strip() else None
        except ValidationError as error:
            raise InputError(f'body: expected {{"to": SEQ}} or nothing ({error.errors()[0]["msg"]})') from error
        return await self._do(request, stream_id, Rollback(request.state.request_id, to))

    async def reset(self, request: Request, stream_id: str) -> Response:
        """Return the stream to the source model, bit for bit."""
        return await self._do(request, stream_id, Reset(request.state.request_id))

    async def delete(self, request: Request, stream_id: str) -> Response:
        """Forget the stream, in memory and on disk."""
        return await self._do(request, stream_id, Delete(request.state.request_id))

    async def status(self, request: Request, stream_id: str) -> Response:
        """Say how a stream goes."""
        stream = self._find(request, stream_id)
        names = await asyncio.to_thread(self._engine.context.store.names, stream_id)
        snapshots = [{"seq": name.seq, "version": name.version, "kind": name.kind} for name in names]
        return SafeJSON({**(await self._describe([stream]))[0], "snapshots": snapshots})

    async def events(self, request: Request, stream_id: str, after: int = 0) -> Response:
        """Return what happened in a stream, as far as it is remembered."""
        stream = self._find(request, stream_id)
        return SafeJSON({"stream": stream_id, "run": RUN, "events": stream.events(after)})

    async def list_streams(self, request: Request, limit: Annotated[int, Query(ge=1, le=10_000)] = 100) -> Response:
        """List the streams, the most recently used first."""
        access: Access = request.state.access
        streams = [stream for stream in self._engine.streams() if access.allows(stream.id)]
        streams.sort(key=lambda stream: stream.used, reverse=True)
        return SafeJSON({"streams": await self._describe(streams[:limit]), "total": len(streams)})

    async def about(self) -> Response:
        """Say which model is served, how it adapts, and what the limits are."""
        settings = {key: value for key, value in vars(self._server.settings).items() if key != "state"}
        facts = {"run": RUN, "process": os.getpid(), "version": dpl.__version__, "limits": settings}
        return SafeJSON({**self._server.about, **facts})

    async def metrics(self, request: Request) -> Response:
        """Figures for Prometheus; only for tokens that may see every stream."""
        if request.state.access != OPEN:
            raise NoStream("metrics are for tokens without a stream prefix")
        return Response(self._server.metrics.text(), media_type="text/plain; version=0.0.4")

    async def health(self) -> Response:
        """Say whether all is well; 200 as long as predictions are answered."""
        problems = self._server.problems
        return SafeJSON({"status": "degraded" if problems else "ok", "problems": problems})

    async def ready(self) -> Response:
        """200 while requests are taken."""
        taking = self._engine.accepting
        return SafeJSON({"status": "ready" if taking else "stopping"}, status_code=200 if taking else 503)

    async def _do(self, request: Request, stream_id: str, job: Job) -> Response:
        self._find(request, stream_id)
        await self._body(request)
        try:
            with self._engine.admit(stream_id) as stream:
                return await self._complete(request, stream, job)
        except KeyError:
            raise NoStream(f"no stream {stream_id!r}") from None

    async def _complete(self, request: Request, stream: Stream, job: Job) -> Response:
        """Queue a job and wait for its answer; give it up when the client has gone or the time is over."""
        self._engine.submit(stream, job)
        answer = asyncio.wrap_future(job.answer)
        gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait(
                {answer, gone}, timeout=self._server.settings.timeout, return_when=asyncio.FIRST_COMPLETED
            )
            left = gone.done()
        except asyncio.CancelledError:
            self._engine.cancel(stream, job)
            raise
        finally:
            gone.cancel()
        if not answer.done() and self._engine.cancel(stream, job):
            if left:
                return Response(status_code=GONE)
            raise Overloaded(503, f"not begun within {self._server.settings.timeout} s", 5)
        return SafeJSON(await answer)

    async def _read(self, request: Request) -> Tensor:
        """Read and decode the images of a request; decoding happens in threads of its own."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        intake, loop, decoders = self._server.intake, asyncio.get_running_loop(), self._server.decoders
        if kind == "multipart/form-data":
            return await loop.run_in_executor(decoders, intake.from_files, await self._files(request))
        body = await self._body(request)
        if kind == "application/json":
            return await loop.run_in_executor(decoders, intake.from_json, body)
        if kind == "application/octet-stream":
            return await loop.run_in_executor(decoders, intake.from_raw, body, request.headers.get("x-shape"))
        if kind.startswith("image/"):
            return await loop.run_in_executor(decoders, intake.from_files, [body])
        raise InputError(
            f"Content-Type {kind[:80]!r}: expected multipart/form-data, application/json, "
            "application/octet-stream or image/*"
        )

    async def _files(self, request: Request) -> list[bytes]:
        limit = self._server.settings.max_batch
        async with _in_time(self._server.settings.timeout), request.form(max_files=limit, max_fields=limit) as form:
            parts = [part for _, part in form.multi_items()]
            if any(not isinstance(part, UploadFile) for part in parts):
                raise InputError("the form has fields that are no files; expected image files alone")
            return [await part.read() for part in parts if isinstance(part, UploadFile)]

    async def _body(self, request: Request) -> bytes:
        async with _in_time(self._server.settings.timeout):
            return await request.body()

    def _find(self, request: Request, stream_id: str) -> Stream:
        _permit(request, stream_id)
        try:
            return self._engine.find(stream_id)
        except KeyError:
            raise NoStream(f"no stream {stream_id!r}") from None

    async def _describe(self, streams: list[Stream]) -> list[dict[str, Any]]:
        for stream in streams:
            if stream.unread and not stream.images:
                await asyncio.to_thread(self._engine.acquaint, stream)
        names, every = self._engine.context.names, self._server.settings.snapshot_every
        return [stream.describe(names, every) for stream in streams]


class _Page:
    """A self-contained page; its policy allows its own script and style and nothing from elsewhere."""

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


def _permit(request: Request, stream_id: str) -> None:
    """Refuse a name that cannot be one, and hide streams of others."""
    check_stream_id(stream_id)
    if not request.state.access.allows(stream_id):
        raise NoStream(f"no stream {stream_id!r}")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def _in_time(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Overloaded(408, f"the body did not arrive within {seconds} s", 1) from None


def _body_of(model: type[RollbackRequest]) -> dict[str, Any]:
    return {"requestBody": {"content": {"application/json": {"schema": model.model_json_schema()}}}}
