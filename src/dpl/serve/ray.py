"""A server in several processes, on one machine or several: Ray Serve starts, places and restarts them.

Each process is a deployment with one replica: a complete server with a state folder of its own. A stream belongs to the
replica that its name hashes to, so each stream has one writer. A router passes every request on to the owner.
"""

import asyncio
import hashlib
import json
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dpl.core.errors import SettingError
from dpl.core.extras import optional
from dpl.serve.app import make_app
from dpl.serve.middleware import RequestFilter, Tokens, replay
from dpl.serve.monitoring import Metrics
from dpl.serve.schemas import Overloaded, SafeJSON
from dpl.serve.server import Server
from dpl.serve.settings import RaySettings, ServeSettings
from dpl.serve.store import check_replicas

__all__ = ["Router", "call_app", "owner", "replica_folder", "serve_on_ray"]

Ask = Callable[[int, Scope, bytes], Awaitable[Response]]  # send a request to the replica with this number
Build = Callable[[int], Server]  # open the server of the replica with this number
_APPLICATION = "dpl-serve"
_HEALTH_SECONDS = 1.0  # Ray checks this often whether a replica is alive
_STREAM = re.compile(r"/(?:v1/streams|v2/models)/([^/]+)")


def owner(stream_id: str, count: int) -> int:
    """Return the replica that owns a stream; the result is the same in every process and on every machine."""
    return int.from_bytes(hashlib.sha256(stream_id.encode()).digest()[:8], "big") % count


def replica_folder(state: Path, index: int, count: int) -> Path:
    """Return the state folder of one replica."""
    return state / f"replica-{index}-of-{count}"


class Router:
    """Passes a request on to the owner of its stream; the `RequestFilter` around it responds to errors.

    The list of streams is that of all replicas. Every other page is that of replica 0, or of `?replica=NUMBER`.
    """

    def __init__(self, ask: Ask, count: int) -> None:
        self._ask, self._count = ask, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request."""
        request, path = Request(scope, receive), scope["path"]
        body, headers = await request.body(), MutableHeaders(raw=list(scope["headers"]))
        headers["x-request-id"] = request.state.request_id
        kept = {key: scope[key] for key in ("type", "method", "path", "query_string")}  # can be sent elsewhere
        passed = {**kept, "http_version": "1.1", "scheme": "http", "headers": headers.raw}
        given = request.query_params.get("replica", "0")
        if stream := _STREAM.match(path):
            response = await self._ask(owner(stream[1], self._count), passed, body)
        elif path == "/v1/streams":
            response = await self._list_streams(passed, body)
        elif given in map(str, range(self._count)):
            response = await self._ask(int(given), passed, body)
        else:
            raise HTTPException(422, f"replica={given[:20]}: expected 0 to {self._count - 1}")
        await response(scope, receive, send)

    async def _list_streams(self, scope: Scope, body: bytes) -> Response:
        responses = await asyncio.gather(*(self._ask(index, scope, body) for index in range(self._count)))
        for response in responses:
            if response.status_code != 200:
                return response
        lists = [json.loads(bytes(response.body)) for response in responses]
        streams = [stream for part in lists for stream in part["streams"]]
        return SafeJSON({"streams": streams, "total": sum(part["total"] for part in lists)})


async def call_app(app: ASGIApp, scope: Scope, receive: Receive) -> Response:
    """Run an application in this process and return its whole response."""
    response, parts = Response(), []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            response.status_code, response.raw_headers = message["status"], list(message["headers"])
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    response.body = b"".join(parts)
    return response


class Replica:
    """Deployment: one server with the streams that it owns."""

    def __init__(self, build: Build, index: int) -> None:
        self._server = build(index)
        self._app = make_app(self._server)
        self._answers: set[asyncio.Task[Response]] = set()

    async def answer(self, scope: Scope, body: bytes) -> Response:
        """Respond to a request; if its client leaves, Ray cancels this call."""
        answer = asyncio.ensure_future(call_app(self._app, dict(scope), replay(body)))
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)
        return await answer

    async def stop(self) -> None:
        """Save every stream in the time of a stop; then refuse requests whose step hangs, as Ray waits for them."""
        await asyncio.to_thread(self._server.close)
        for answer in self._answers:
            answer.cancel()

    def about(self) -> dict[str, Any]:
        """Return which model is served."""
        return self._server.about

    def __del__(self) -> None:
        """Save every stream; Ray calls this at an orderly stop, also at one that it begins itself."""
        if hasattr(self, "_server"):
            self._server.close()


class Ingress:
    """Deployment: takes requests from Ray's HTTP proxy, checks them, and routes them."""

    def __init__(self, replicas: list[Any], settings: ServeSettings, tokens: Tokens | None) -> None:
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        async def ask(index: int, scope: Scope, body: bytes) -> Response:
            try:
                # A replica gives a request up after `timeout`. If that passes twice, the replica is unavailable.
                async with asyncio.timeout(2 * settings.timeout):
                    response: Response = await replicas[index].answer.remote(scope, body)
                    return response
            except (TimeoutError, RayError, RayServeException) as error:
                reason = f"replica {index} is unavailable ({type(error).__name__}) and is restarting; retry later"
                raise Overloaded(503, reason, 2) from error

        self._app = RequestFilter(Router(ask, len(replicas)), settings, tokens, Metrics())

    async def __call__(self, request: Request) -> Response:
        """Respond to one request; Ray's proxy sets the header with the request's id itself."""
        response = await call_app(self._app, request.scope, request.receive)
        del response.headers["x-request-id"]
        return response


@contextmanager
def serve_on_ray(
    build: Build, settings: ServeSettings, tokens: Tokens | None, options: RaySettings, http: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Run the deployments while the block runs, and yield which model is served; `http` has options of Ray's proxy.

    At the end each replica saves its streams. A cluster that was not started here keeps running.
    """
    check_replicas(settings.state, options.replicas)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray, serve = optional("ray", "ray"), optional("ray.serve", "ray")
    _connect(ray, options)
    try:
        serve.start(http_options={"location": "HeadOnly" if options.address is None else "EveryNode", **http})
        serve.run(_application(serve, build, settings, tokens, options), name=_APPLICATION, route_prefix="/")
        replicas = [serve.get_deployment_handle(f"replica-{i}", _APPLICATION) for i in range(options.replicas)]
        try:
            yield replicas[0].about.remote().result()
        finally:  # all save at once; one that is down or too late is Ray's to end
            end = time.monotonic() + settings.stop_seconds
            for stopped in [replica.stop.remote() for replica in replicas]:
                with suppress(Exception):
                    stopped.result(timeout_s=max(0.1, end - time.monotonic()))
    finally:
        serve.delete(_APPLICATION)
        if options.address is None:
            serve.shutdown()
        ray.shutdown()


def _connect(ray: Any, options: RaySettings) -> None:
    cpus = max(os.cpu_count() or 1, int(options.replicas * options.replica_cpus + 1))
    local = {"num_cpus": cpus, "include_dashboard": False} if options.address is None else {}
    try:
        ray.init(address=options.address or "local", log_to_driver=False, **local)
    except Exception as error:  # Ray raises a plain Exception when the machine exceeds its time limit
        ray.shutdown()
        where = f"no cluster at --address {options.address}" if options.address else "Ray could not be started here"
        raise SettingError(f"{where}: {error}") from error


def _application(serve: Any, build: Build, settings: ServeSettings, tokens: Tokens | None, options: RaySettings) -> Any:
    """Return the deployments: one for each replica, and the router before them."""
    room = 2 * settings.queue + 16  # above the server's own queues, whose 429 and 503 say when to retry
    deploy = partial(
        serve.deployment,
        health_check_period_s=_HEALTH_SECONDS,
        health_check_timeout_s=settings.timeout,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=settings.timeout + settings.stop_seconds,  # for requests, then for `__del__`
        max_queued_requests=room,
    )
    needs = {"num_cpus": options.replica_cpus, "num_gpus": options.replica_gpus}
    replicas = [
        deploy(Replica, name=f"replica-{i}", ray_actor_options=needs, max_ongoing_requests=room).bind(build, i)
        for i in range(options.replicas)
    ]
    room *= options.replicas
    router = deploy(Ingress, name="router", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=room)
    return router.bind(replicas, settings, tokens)
