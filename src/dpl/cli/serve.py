"""`dpl serve`: serve a model over HTTP that adapts to each stream of images."""

import argparse
import dataclasses
import faulthandler
import hashlib
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
from typing import TYPE_CHECKING, Any, get_args

import torch

import dpl
from dpl.cli.console import print_json, warn
from dpl.cli.models import (
    SOURCE_IMAGES,
    adaptation,
    add_adaptation_arguments,
    load_source,
    spread,
    training_record,
)
from dpl.core.errors import DataError, SettingError
from dpl.core.extras import optional
from dpl.core.files import file_sha256
from dpl.core.settings import whole_number
from dpl.data import open_folder
from dpl.data.transforms import Evaluation
from dpl.serve.settings import RaySettings, ServeSettings

if TYPE_CHECKING:
    from dpl.serve.middleware import Tokens
    from dpl.serve.server import Server

__all__ = ["add_arguments", "run"]

_GROUPS = {
    "model": {"workers", "live_models", "answer"},
    "storage": {"max_streams_in_memory", "snapshot_every", "keep_snapshots", "events_kept", "on_storage_failure"},
}  # all other settings are limits
_EXAMPLES = """examples:
  dpl serve --model runs/pacs/sketch
  dpl serve --model resnet18 --weights my.safetensors --classes names.txt --method dpl --port 8080
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog, parser.formatter_class = _EXAMPLES, argparse.RawDescriptionHelpFormatter
    model, storage, limits, security, ray = (
        parser.add_argument_group(title) for title in ("model", "storage", "limits", "security", "Ray")
    )
    add_adaptation_arguments(model)
    model.add_argument("--threads", type=int, metavar="N", help="CPU threads of each worker (default: torch's choice)")
    add = storage.add_argument
    add("--state", type=Path, default=Path("dpl-state"), metavar="DIR",
        help="folder for the adapted state of the streams (default: %(default)s)")  # fmt: skip
    add("--journal", type=Path, metavar="FILE", help="append every event of every stream as JSON, one per line")
    add("--log-format", choices=("text", "json"), default="text",
        help="form of the log on standard error (default: %(default)s)")  # fmt: skip
    _add_security(security)
    ray.add_argument("--engine", choices=("local", "ray"), default="local",
                     help="local: one process; ray: several, by Ray Serve (default: %(default)s)")  # fmt: skip
    groups = {name: group for group, title in ((model, "model"), (storage, "storage")) for name in _GROUPS[title]}
    for field in dataclasses.fields(ServeSettings):
        if field.name != "state":
            _add_setting(groups.get(field.name, limits), field)
    for field in dataclasses.fields(RaySettings):
        _add_setting(ray, field)


def _add_security(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1",
        help="address; anything but loopback requires --token-file (default: %(default)s)")  # fmt: skip
    add("--port", type=int, default=8000, help="0 chooses a free port (default: %(default)s)")
    add("--token-file", type=Path, metavar="FILE",
        help="lines of TOKEN [STREAM_PREFIX]; a prefix limits the token to streams with it")  # fmt: skip
    add("--tls-cert", type=Path, metavar="FILE", help="certificate, to serve HTTPS")
    add("--tls-key", type=Path, metavar="FILE", help="private key of the certificate")


def _add_setting(group: argparse._ArgumentGroup, field: "dataclasses.Field[Any]") -> None:
    default, about = field.default, field.metadata["help"]
    if default is not None:
        about += " (default: %(default)s)"
    kind: dict[str, Any] = {"type": type(default), "metavar": "N"} if isinstance(default, (int, float)) else {}
    choices = get_args(field.type) if isinstance(default, str) else None
    group.add_argument(f"--{field.name.replace('_', '-')}", default=default, choices=choices, help=about, **kind)


def run(args: argparse.Namespace) -> None:
    """Load the model and serve until stopped."""
    for module in ("fastapi", "uvicorn", "prometheus_client", "python_multipart"):
        optional(module, "serve")
    if args.engine == "ray":
        optional("ray.serve", "ray")
    settings, tokens = ServeSettings(**_values(args, ServeSettings)), _tokens(args)
    if args.engine == "ray":
        _run_on_ray(args, settings, tokens)
        return
    with _bound(args.host, args.port) as place:
        server = _server(args, settings, tokens)
        _announce(args, place.getsockname()[1], server.about, server.problems)
        _serve(args, place, server)


def _values(args: argparse.Namespace, kind: type[Any]) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(kind)}


def _run_on_ray(args: argparse.Namespace, settings: ServeSettings, tokens: "Tokens | None") -> None:
    """Serve from several processes, each with the streams that it owns."""
    from dpl.serve.ray import serve_on_ray

    options = RaySettings(**_values(args, RaySettings))
    _source(args)[0]()  # a wrong option is reported here, in one line
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
        torch.set_num_threads(whole_number("--threads", args.threads, 1))
    make, transform, size, names = _source(args)
    identity = {"source_images": _digest(args.source)} if args.source else {}
    return Server(make, transform, (3, size, size), settings, names=names, tokens=tokens, identity=identity)


def _digest(folder: Path) -> str:
    """Identify a folder of images by the names of all and the contents of those that are read, wherever it lies."""
    images = open_folder(folder)
    files = [Path(images.location(index)) for index in range(len(images))]
    read = {files[index] for index in spread(len(files), SOURCE_IMAGES)}  # those of `labelled_images`
    digest = hashlib.sha256()
    for file in sorted(files):
        try:
            contents = file_sha256(file) if file in read else ""
        except DataError:  # it is skipped as an image, too; a link may lead nowhere
            contents = "unreadable"
        digest.update(f"{file.relative_to(folder).as_posix()} {contents}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _source(args: argparse.Namespace) -> tuple[Callable[[], dpl.AdaptiveModel], Evaluation, int, tuple[str, ...]]:
    """Return what makes an adaptive model, the transform of an image to its input, its size, and the class names.

    Labelled images are read once, and all models share them.
    """
    network, transform, size = load_source(args)
    names = tuple(training_record(args).get("classes") or ())
    # A fixed layout: a restarted server must continue with bitwise identical results.
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    make = partial(dpl.adapt, network, layout="as_is", **adaptation(args, transform, names))
    return make, transform, size, names


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
