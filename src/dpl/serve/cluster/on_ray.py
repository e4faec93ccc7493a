"""The parts of a divided server as Ray Serve deployments.

Every part is a deployment with one replica and a name of its own, so that a stream always goes to the same process. If
that process dies, Ray starts it again and it reads its streams from the state folder; requests wait for it meanwhile.
"""

import asyncio
import dataclasses
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dpl.core.errors import SettingError
from dpl.core.extras import optional
from dpl.serve.app import make_app
from dpl.serve.cluster.front import Link, make_front
from dpl.serve.cluster.relay import Ask, Reply, answered, collect
from dpl.serve.engine import Overloaded
from dpl.serve.gate import GateRules
from dpl.serve.metrics import Metrics
from dpl.serve.security import Tokens
from dpl.serve.server import Server
from dpl.serve.settings import ServeSettings
from dpl.serve.shard import Shard

__all__ = ["RayOptions", "RayServer"]

_NAME = "dpl-serve"
_HEALTH_SECONDS = 1.0  # how often Ray asks whether a part lives: the time until it notices a death
Build = Callable[[Shard], Server]


@dataclass(frozen=True)
class RayOptions:
    """How the parts are spread."""

    replicas: int
    address: str | None  # of a running cluster; None starts one on this machine for the time of the server
    cpus: float
    gpus: float
    http: dict[str, Any]  # host, port and so on of Ray Serve's proxy


class Part:
    """A process with the streams of one shard and the whole application in front of them."""

    def __init__(self, build: Build, shard: Shard) -> None:
        self._server: Server | None = None
        self._server = build(shard)
        self._app = make_app(self._server)

    async def answer(self, ask: Ask) -> Reply:
        """Answer a request."""
        return await answered(self._app, ask)

    def about(self) -> dict[str, Any]:
        """Say what is served."""
        return self._running().about

    def check_health(self) -> None:
        """Raise if the threads that run the model have ended: Ray then starts the part again."""
        if not self._running().engine.alive:
            raise RuntimeError("a thread that runs the model has ended")

    def __del__(self) -> None:
        """Ray calls this at an orderly end: every stream is written."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _running(self) -> Server:
        if self._server is None:
            raise RuntimeError("the part has ended")
        return self._server


class RayFront:
    """The deployment that HTTP requests reach first."""

    def __init__(self, handles: list[Any], settings: ServeSettings, tokens: Tokens | None) -> None:
        links = [_link(handle, index, settings.timeout) for index, handle in enumerate(handles)]
        rules = GateRules(settings.max_body, tokens, Metrics())
        self._app = make_front(links, rules, settings.timeout)

    async def __call__(self, request: Request) -> Response:
        """Answer a request; its id comes back in a header that Ray's proxy sets by itself."""
        reply = await collect(self._app, request.scope, request.receive)
        headers = tuple(pair for pair in reply.headers if pair[0].lower() != b"x-request-id")
        return dataclasses.replace(reply, headers=headers).response()


def _link(handle: Any, index: int, timeout: float) -> Link:
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    async def ask_part(ask: Ask) -> Reply:
        try:
            async with asyncio.timeout(
                2 * timeout
            ):  # a part gives up after `timeout` itself: more means that it is away
                reply: Reply = await handle.answer.remote(ask)
                return reply
        except (TimeoutError, RayError, RayServeException) as error:
            reason = f"replica {index} of this stream is away ({type(error).__name__}) and will be started again"
            raise Overloaded(503, reason, 2) from error

    return ask_part


class RayServer:
    """A divided server while it runs."""

    def __init__(self, build: Build, settings: ServeSettings, tokens: Tokens | None, options: RayOptions) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._ray, self._serve = optional("ray", "ray"), optional("ray.serve", "ray")
        self._options = options
        self._connect()
        try:
            everywhere = "HeadOnly" if options.address is None else "EveryNode"
            self._serve.start(http_options={"location": everywhere, **options.http})
            self._serve.run(self._application(build, settings, tokens), name=_NAME, route_prefix="/")
        except BaseException:
            self.close()
            raise

    def about(self) -> dict[str, Any]:
        """Say what is served."""
        handle = self._serve.get_deployment_handle("part-0", _NAME)
        about: dict[str, Any] = handle.about.remote().result()
        return {**about, "replicas": self._options.replicas}

    def wait(self) -> None:
        """Return when told to stop (Ctrl-C, SIGTERM)."""
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        stop.wait()

    def close(self) -> None:
        """End the parts, each of which writes its streams; a cluster of others is left running."""
        self._serve.delete(_NAME)
        if self._options.address is None:
            self._serve.shutdown()
        self._ray.shutdown()

    def _connect(self) -> None:
        options = self._options
        cpus = max(os.cpu_count() or 1, int(options.replicas * options.cpus + 1))
        local = {"num_cpus": cpus, "include_dashboard": False} if options.address is None else {}
        try:
            self._ray.init(address=options.address or "local", log_to_driver=False, **local)
        except Exception as error:  # Ray raises a bare one when the machine is too slow for its own time limit
            self._ray.shutdown()
            where = f"no cluster at --address {options.address}" if options.address else "Ray could not be started here"
            raise SettingError(f"{where}: {error}") from error

    def _application(self, build: Build, settings: ServeSettings, tokens: Tokens | None) -> Any:
        options, room = self._options, 2 * settings.queue + 16
        common = {
            "health_check_period_s": _HEALTH_SECONDS,
            "health_check_timeout_s": settings.timeout,
            "graceful_shutdown_wait_loop_s": 0.2,
            "graceful_shutdown_timeout_s": settings.timeout + 10,
            "max_ongoing_requests": room,  # above the part's own queues, whose 429 and 503 say when to come back
            "max_queued_requests": room,
        }
        actor = {"num_cpus": options.cpus, "num_gpus": options.gpus}
        parts = [
            self._serve.deployment(Part, name=f"part-{index}", ray_actor_options=actor, **common).bind(
                build, Shard(index, options.replicas)
            )
            for index in range(options.replicas)
        ]
        front = {**common, "max_ongoing_requests": room * options.replicas}
        return self._serve.deployment(RayFront, name="front", ray_actor_options={"num_cpus": 0}, **front).bind(
            parts, settings, tokens
        )
