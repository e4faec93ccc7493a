"""`dpl serve`: a model that adapts to each stream of images, over HTTP."""

import argparse
import dataclasses
import logging
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpl.cli.console import print_json, warn
from dpl.cli.models import (
    add_model_arguments,
    class_names,
    evaluation_transform,
    parse_settings,
    source_network,
    training_record,
)
from dpl.core.errors import SettingError
from dpl.core.extras import optional

if TYPE_CHECKING:
    from torch import nn

    from dpl.data.transforms import Evaluation
    from dpl.model.adaptive import AdaptiveModel
    from dpl.serve.security import Tokens
    from dpl.serve.server import Server
    from dpl.serve.settings import ServeSettings
    from dpl.serve.shard import Shard

__all__ = ["add_arguments", "run"]

_CHOICES = {
    "answer": "first: predict, answer, then adapt; after: answer when adapted; auto: first where the method allows",
    "on_storage_failure": "while the state folder cannot be written: go on adapting, or stop until it can",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    from dpl.serve.settings import ServeSettings

    add_model_arguments(parser)
    parser.add_argument("--state", type=Path, default=Path("dpl-state"), metavar="DIR",
                        help="folder for what the streams have learned (default: %(default)s)")  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address; others than this machine's own need a token")
    parser.add_argument("--port", type=int, default=8000, help="0 takes any free one (default: %(default)s)")
    parser.add_argument("--token-file", type=Path, metavar="FILE",
                        help="lines of TOKEN [STREAM_PREFIX]: who may ask, for which streams")  # fmt: skip
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate, to serve HTTPS")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key")
    parser.add_argument(
        "--journal", type=Path, metavar="FILE", help="append every event of every stream, as JSON lines"
    )
    parser.add_argument("--no-guard", action="store_true", help="adapt without the guard")
    parser.add_argument("--guard-set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the guard")
    parser.add_argument("--threads", type=int, help="CPU threads of each model run (default: torch's choice)")
    parser.add_argument("--engine", choices=("local", "ray"), default="local",
                        help="local: one process; ray: streams spread over Ray Serve replicas")  # fmt: skip
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="ray: processes (default: %(default)s)")
    parser.add_argument("--replica-cpus", type=float, default=1.0, metavar="N", help="ray: CPUs of each")
    parser.add_argument("--replica-gpus", type=float, default=0.0, metavar="N", help="ray: GPUs of each")
    parser.add_argument(
        "--address", help="ray: a running cluster (default: one on this machine, ended with the server)"
    )
    for field in dataclasses.fields(ServeSettings):
        _add_setting(parser, field)


def _add_setting(parser: argparse.ArgumentParser, field: "dataclasses.Field[Any]") -> None:
    option = f"--{field.name.replace('_', '-')}"
    if field.name in _CHOICES:
        choices = {"answer": ("auto", "first", "after"), "on_storage_failure": ("adapt", "stop")}[field.name]
        parser.add_argument(option, choices=choices, default=field.default, help=_CHOICES[field.name])
    elif field.name != "state":
        parser.add_argument(option, type=type(field.default), default=field.default, metavar="N",
                            help=f"{field.metadata['help']} (default: %(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Load the model and serve until told to stop."""
    for module in ("fastapi", "uvicorn", "prometheus_client", "python_multipart"):
        optional(module, "serve")
    from dpl.serve.settings import ServeSettings

    if args.engine == "ray":
        optional("ray.serve", "ray")
    settings = ServeSettings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(ServeSettings)})
    tokens = _tokens(args)
    if args.engine == "ray":
        _run_on_ray(args, settings, tokens)
        return
    with _bound(args.host, args.port) as place:
        server = _server(args, settings, tokens)
        _announce(args, place.getsockname()[1], server.about, server.problems)
        _serve(args, place, server)


def _run_on_ray(args: argparse.Namespace, settings: "ServeSettings", tokens: "Tokens | None") -> None:
    """Serve from several processes, each with the streams that it owns."""
    from dpl.serve.cluster.on_ray import RayOptions, RayServer

    if args.replicas < 1:
        raise SettingError(f"--replicas {args.replicas}: expected at least 1")
    _maker(args, _source(args)[0])()  # a wrong option is told here, in one line
    with _bound(args.host, args.port) as place:
        port = place.getsockname()[1]
    http = {"host": args.host, "port": port, "ssl_certfile": args.tls_cert and str(args.tls_cert),
            "ssl_keyfile": args.tls_key and str(args.tls_key)}  # fmt: skip
    settings = dataclasses.replace(settings, state=settings.state.resolve())
    options = RayOptions(args.replicas, args.address, args.replica_cpus, args.replica_gpus, http)
    server = RayServer(partial(_server, args, settings, tokens), settings, tokens, options)
    try:
        _announce(args, port, server.about(), [])
        server.wait()
    finally:
        server.close()


def _keep_journal(path: Path) -> None:
    """Write events to a file; a new one is begun when a log rotation has taken the old one away."""
    logging.getLogger("dpl.serve.journal").addHandler(WatchedFileHandler(path))


def _tokens(args: argparse.Namespace) -> "Tokens | None":
    from dpl.serve.security import Tokens, require_token

    tokens = Tokens.from_file(args.token_file) if args.token_file else None
    if args.token_file and args.token_file.stat().st_mode & 0o077:
        warn(f"dpl serve: {args.token_file} can be read by others; chmod 600 it")
    require_token(args.host, tokens)
    if bool(args.tls_cert) != bool(args.tls_key):
        raise SettingError("--tls-cert and --tls-key need each other; give both or none")
    return tokens


def _bound(host: str, port: int) -> socket.socket:
    """Take the address before the model is loaded: a wrong one is told at once."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        place = socket.socket(family, kind, proto)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(address)
    except (OSError, OverflowError) as error:
        raise SettingError(f"--host {host} --port {port}: {error}") from error
    return place


def _server(
    args: argparse.Namespace, settings: "ServeSettings", tokens: "Tokens | None", shard: "Shard | None" = None
) -> "Server":
    """Load the model and open the state folder; for a shard, in the process that owns it."""
    import torch

    from dpl.serve.server import open_server
    from dpl.serve.shard import WHOLE

    if args.journal is not None:
        _keep_journal(args.journal if shard is None else args.journal.with_name(f"{args.journal.name}.{shard.index}"))
    if args.threads is not None:
        if args.threads < 1:
            raise SettingError(f"--threads {args.threads}: expected at least 1")
        torch.set_num_threads(args.threads)
    network, transform, size, names = _source(args)
    return open_server(
        _maker(args, network), transform, (3, size, size), settings, names=names, tokens=tokens, shard=shard or WHOLE
    )


def _source(args: argparse.Namespace) -> "tuple[nn.Module, Evaluation, int, tuple[str, ...]]":
    """Return the network, how an image becomes its input, the side of that, and the names of the classes."""
    record = training_record(args)
    classes = class_names(args.classes) or record.get("classes")
    network, own_size = source_network(args, record, classes)
    size = args.size or record.get("size") or own_size
    return network, evaluation_transform(size, square="size" in record), size, tuple(classes or ())


def _maker(args: argparse.Namespace, network: "nn.Module") -> "Callable[[], AdaptiveModel]":
    import torch

    import dpl

    # One layout, chosen beforehand: a server that is started again must continue to the bit.
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    settings, guard = parse_settings(args.set), False if args.no_guard else parse_settings(args.guard_set)
    return lambda: dpl.adapt(network, args.method, guard=guard, layout="as_is", **settings)


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

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = uvicorn.Config(
        make_app(server),
        log_level="warning",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=int(server.settings.timeout) + 1,
        limit_concurrency=8 * server.settings.queue + 64,
        ssl_certfile=args.tls_cert,
        ssl_keyfile=args.tls_key,
    )
    uvicorn.Server(config).run(sockets=[place])
