"""`dpl serve`: serve a model over HTTP that adapts to each stream of images."""

import argparse
import dataclasses
import faulthandler
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from logging.handlers import WatchedFileHandler
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

import dpl
from dpl.cli import models
from dpl.cli.console import print_json, warn
from dpl.core.errors import SettingError
from dpl.core.extras import optional
from dpl.serve.settings import RaySettings, ServeSettings

if TYPE_CHECKING:
    from dpl.serve.middleware import Tokens
    from dpl.serve.server import Server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    models.add_adaptation_arguments(parser.add_argument_group("model"))
    add = parser.add_argument_group("address and files").add_argument
    add("--host", default="127.0.0.1", help="anything but loopback requires --token-file (default: %(default)s)")
    add("--port", type=int, default=8000, help="0 chooses a free port (default: %(default)s)")
    add("--token-file", type=Path, metavar="FILE",
        help="lines of TOKEN [STREAM_PREFIX]; a prefix limits the token to streams with it")  # fmt: skip
    add("--tls-cert", type=Path, metavar="FILE", help="certificate, to serve HTTPS")
    add("--tls-key", type=Path, metavar="FILE", help="private key of the certificate")
    add("--state", type=Path, default=Path("dpl-state"), metavar="DIR",
        help="folder for the adapted state of the streams (default: %(default)s)")  # fmt: skip
    add("--journal", type=Path, metavar="FILE", help="append every event of every stream as JSON, one per line")
    add("--log-format", choices=("text", "json"), default="text", help="log on standard error (default: %(default)s)")
    work = parser.add_argument_group("work and limits")
    work.add_argument("--threads", type=models.count, metavar="N",
                      help="CPU threads of each worker (default: torch's choice)")  # fmt: skip
    models.add_settings(work, ServeSettings, "state")
    ray = parser.add_argument_group("Ray")
    ray.add_argument("--engine", choices=("local", "ray"), default="local", help="local: one process; ray: several")
    models.add_settings(ray, RaySettings)


def run(args: argparse.Namespace) -> None:
    """Load the model and serve until stopped."""
    for module in ("fastapi", "uvicorn", "prometheus_client", "python_multipart"):
        optional(module, "serve")
    if args.engine == "ray":
        optional("ray.serve", "ray")
    settings, tokens = models.read_settings(args, ServeSettings), _tokens(args)
    if args.engine == "ray":
        _run_on_ray(args, settings, tokens)
        return
    with _bound(args.host, args.port) as place:
        server = _server(args, settings, tokens)
        _announce(args, place.getsockname()[1], server.about, server.problems)
        _serve(args, place, server)


def _run_on_ray(args: argparse.Namespace, settings: ServeSettings, tokens: "Tokens | None") -> None:
    """Serve from several processes, each with the streams that it owns."""
    from dpl.serve.ray import serve_on_ray

    options = models.read_settings(args, RaySettings)
    _source(args)[1]()  # a wrong option is reported here, in one line
    with _bound(args.host, args.port) as place:
        port = place.getsockname()[1]
    http = {"host": args.host, "port": port, "ssl_certfile": args.tls_cert and str(args.tls_cert),
            "ssl_keyfile": args.tls_key and str(args.tls_key)}  # fmt: skip
    settings = dataclasses.replace(settings, state=settings.state.resolve())
    build, stop = partial(_replica, args, settings, tokens), threading.Event()
    with serve_on_ray(build, settings, tokens, options, http) as about:
        _announce(args, port, about, [])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        stop.wait()


def _replica(args: argparse.Namespace, settings: ServeSettings, tokens: "Tokens | None", index: int) -> "Server":
    """Open the server of one replica, in its own process."""
    from dpl.serve.ray import replica_folder

    if args.journal is not None:
        args.journal = args.journal.with_name(f"{args.journal.name}.{index}")
    state = replica_folder(settings.state, index, args.replicas)
    return _server(args, dataclasses.replace(settings, state=state), tokens)


def _tokens(args: argparse.Namespace) -> "Tokens | None":
    from dpl.serve.middleware import Tokens, require_token

    tokens = Tokens.from_file(args.token_file) if args.token_file else None
    if args.token_file and args.token_file.stat().st_mode & 0o077:
        warn(f"dpl serve: {args.token_file} can be read by others; chmod 600 it")
    require_token(args.host, tokens)
    if bool(args.tls_cert) != bool(args.tls_key):
        raise SettingError("--tls-cert and --tls-key: expected both or neither")
    return tokens


def _bound(host: str, port: int) -> socket.socket:
    """Bind the address before the model is loaded, so that a wrong one is reported at once."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        place = socket.socket(family, kind, proto)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(address)
    except (OSError, OverflowError) as error:
        raise SettingError(f"--host {host} --port {port}: {error}") from error
    return place


def _server(args: argparse.Namespace, settings: ServeSettings, tokens: "Tokens | None") -> "Server":
    """Load the model and open the state folder."""
    from dpl.serve.monitoring import configure_logging
    from dpl.serve.server import Server

    configure_logging(args.log_format)
    if args.journal is not None:  # this handler opens a new file after a log rotation
        logging.getLogger("dpl.serve.journal").addHandler(WatchedFileHandler(args.journal))
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    source, make = _source(args)
    return Server(
        make, source.transform, (3, source.size, source.size), settings, names=source.classes, tokens=tokens,
        identity={"source_images": models.digest(args.source)} if args.source else {},
    )  # fmt: skip


def _source(args: argparse.Namespace) -> tuple[models.SourceModel, Callable[[], dpl.AdaptiveModel]]:
    """Return the source model and what makes adaptive ones of it; they share labelled images, which are read once."""
    source = models.load_source(args)
    # A fixed layout: a restarted server must continue with bitwise identical results.
    source.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    options = models.adaptation(args, source.transform, source.classes)
    return source, partial(dpl.adapt, source.network, layout="as_is", **options)


def _announce(args: argparse.Namespace, port: int, about: Mapping[str, Any], problems: Sequence[str]) -> None:
    host = f"[{args.host}]" if ":" in args.host else args.host
    url = f"{'https' if args.tls_cert else 'http'}://{host}:{port}"
    if args.json:
        print_json({"url": url, "state": str(args.state), **about})
    else:
        print(f"{args.method} on {args.model}: {url} (page), {url}/docs (API); state in {args.state}")
    for problem in problems:
        warn(f"dpl serve: {problem}")
    sys.stdout.flush()


def _serve(args: argparse.Namespace, place: socket.socket, server: "Server") -> None:
    import uvicorn

    from dpl.serve.app import make_app
    from dpl.serve.middleware import limited_protocol

    settings = server.settings
    server.decoders.start()
    config = uvicorn.Config(
        make_app(server),
        http=limited_protocol(settings),
        ws="none",
        log_level="error",  # what a stranger sends is no warning
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=int(settings.stop_seconds / 2),  # the other half is for the disk
        h11_max_incomplete_event_size=settings.max_header,
        ssl_certfile=args.tls_cert,
        ssl_keyfile=args.tls_key,
    )

    class Runner(uvicorn.Server):
        """Keeps the time of a stop even if a step hangs: nothing can end its thread, and the process waits for it."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if not self.should_exit:
                server.begin_stop()
                faulthandler.dump_traceback_later(max(settings.stop_seconds, 1.0), exit=True)
            super().handle_exit(sig, frame)

    try:
        Runner(config).run(sockets=[place])
    finally:
        if server.is_idle:  # else the process would wait for the thread that hangs
            faulthandler.cancel_dump_traceback_later()
