"""A server in several processes, on one machine or several: Ray Serve starts, places and restarts them.

Each process is a deployment with one replica: a complete server with a state folder of its own. A stream belongs to the
replica that its name hashes to, so each stream has one writer. A router passes every request on to the owner. If a
replica dies, Ray restarts it and it reads its streams from its folder; until then, requests for them wait or get 503.
"""

import asyncio
import hashlib
import json
import os
import re
import signal
import threading
from collections.abc import Awaitable, Callable
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
from dpl.serve.metrics import Metrics
from dpl.serve.middleware import RequestFilter, Tokens, replay
from dpl.serve.schemas import Overloaded, SafeJSON, handle_error
from dpl.serve.server import Server
from dpl.serve.settings import RaySettings, ServeSettings

__all__ = ["RayServer", "Router", "call_app", "check_folder", "owner", "replica_folder"]

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


def check_folder(state: Path, count: int) -> None:
    """Refuse a folder that was written by another number of replicas, where streams have other owners."""
    for path in state.glob("*"):
        if path.name == "streams" or re.fullmatch(rf"replica-\d+-of-(?!{count}$)\d+", path.name):
            raise SettingError(
                f"--state {state}: {path.name} was written with another --engine or --replicas than {count}; "
                "use the same number again, or choose another folder"
            )


class Router:
    """Passes a request on to the owner of its stream.

    The list of streams is that of all replicas. Every other page is that of replica 0, or of `?replica=NUMBER`.
    """

    def __init__(self, ask: Ask, count: int) -> None:
        self._ask, self._count = ask, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request."""
        request = Request(scope, receive)
        try:
            response = await self._respond(request, await request.body())
        except HTTPException as error:
            response = handle_error(request, error)
        await response(scope, receive, send)

    async def _respond(self, request: Request, body: bytes) -> Response:
        path, scope = request.scope["path"], _plain_scope(request)
        stream = _STREAM.match(path)
        if stream is not None:
            return await self._ask(owner(stream[1], self._count), scope, body)
        if path == "/v1/streams":
            return await self._list_streams(scope, body)
        return await self._ask(self._chosen(request), scope, body)

    async def _list_streams(self, scope: Scope, body: bytes) -> Response:
        responses = await asyncio.gather(*(self._ask(index, scope, body) for index in range(self._count)))
        for response in responses:
            if response.status_code != 200:
                return response
        lists = [json.loads(bytes(response.body)) for response in responses]
        streams = [stream for part in lists for stream in part["streams"]]
        return SafeJSON({"streams": streams, "total": sum(part["total"] for part in lists)})

    def _chosen(self, request: Request) -> int:
        given = request.query_params.get("replica", "0")
        if given not in map(str, range(self._count)):
            raise HTTPException(422, f"replica={given[:20]}: expected 0 to {self._count - 1}")
        return int(given)


def _plain_scope(request: Request) -> Scope:
    """Return what can be sent to another process; the request keeps its id there."""
    headers = MutableHeaders(raw=list(request.scope["headers"]))
    headers["x-request-id"] = request.state.request_id
    kept = {key: request.scope[key] for key in ("type", "method", "path", "query_string")}
    return {**kept, "http_version": "1.1", "scheme": "http", "headers": headers.raw}


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
        self._server: Server | None = None
        self._server = build(index)
        self._app = make_app(self._server)

    async def answer(self, scope: Scope, body: bytes) -> Response:
        """Respond to a request; if its client leaves, Ray cancels this call."""
        return await call_app(self._app, dict(scope), replay(body))

    def about(self) -> dict[str, Any]:
        """Return which model is served."""
        return {} if self._server is None else self._server.about

    def __del__(self) -> None:
        """Save every stream; Ray calls this at an orderly stop."""
        if self._server is not None:
            self._server.close()
            self._server = None


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
        response.raw_headers = [pair for pair in response.raw_headers if pair[0].lower() != b"x-request-id"]
        return response


class RayServer:
    """The deployments while they run."""

    def __init__(
        self,
        build: Build,
        settings: ServeSettings,
        tokens: Tokens | None,
        options: RaySettings,
        http: dict[str, Any],  # options of Ray's proxy: host, port, ...
    ) -> None:
        check_folder(settings.state, options.replicas)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._ray, self._serve = optional("ray", "ray"), optional("ray.serve", "ray")
        self._options = options
        self._connect()
        try:
            location = "HeadOnly" if options.address is None else "EveryNode"
            self._serve.start(http_options={"location": location, **http})
            self._serve.run(self._application(build, settings, tokens), name=_APPLICATION, route_prefix="/")
        except BaseException:
            self.close()
            raise

    def about(self) -> dict[str, Any]:
        """Return which model is served."""
        handle = self._serve.get_deployment_handle("replica-0", _APPLICATION)
        about: dict[str, Any] = handle.about.remote().result()
        return about

    def wait(self) -> None:
        """Return at Ctrl-C or SIGTERM."""
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        stop.wait()

    def close(self) -> None:
        """Stop the replicas, each of which saves its streams; a cluster that was not started here keeps running."""
        self._serve.delete(_APPLICATION)
        if self._options.address is None:
            self._serve.shutdown()
        self._ray.shutdown()

    def _connect(self) -> None:
        options = self._options
        cpus = max(os.cpu_count() or 1, int(options.replicas * options.replica_cpus + 1))
        local = {"num_cpus": cpus, "include_dashboard": False} if options.address is None else {}
        try:
            self._ray.init(address=options.address or "local", log_to_driver=False, **local)
        except Exception as error:  # Ray raises a plain Exception when the machine exceeds its time limit
            self._ray.shutdown()
            where = f"no cluster at --address {options.address}" if options.address else "Ray could not be started here"
            raise SettingError(f"{where}: {error}") from error

    def _application(self, build: Build, settings: ServeSettings, tokens: Tokens | None) -> Any:
        options = self._options
        room = 2 * settings.queue + 16  # above the server's own queues, whose 429 and 503 say when to retry
        common = {
            "health_check_period_s": _HEALTH_SECONDS,
            "health_check_timeout_s": settings.timeout,
            "graceful_shutdown_wait_loop_s": 0.2,
            "graceful_shutdown_timeout_s": settings.timeout + 10,
            "max_queued_requests": room,
        }
        needs = {"num_cpus": options.replica_cpus, "num_gpus": options.replica_gpus}
        deploy = self._serve.deployment
        replicas = [
            deploy(Replica, name=f"replica-{i}", ray_actor_options=needs, max_ongoing_requests=room, **common).bind(
                build, i
            )
            for i in range(options.replicas)
        ]
        together = room * options.replicas
        return deploy(
            Ingress, name="router", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=together, **common
        ).bind(replicas, settings, tokens)
