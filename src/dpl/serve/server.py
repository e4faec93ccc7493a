"""Puts a server together: live models, streams, store, metrics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpl.core.errors import SettingError
from dpl.data.transforms import Evaluation
from dpl.model.adaptive import AdaptiveModel
from dpl.serve.decoders import DecoderPool
from dpl.serve.engine import Engine
from dpl.serve.images import RequestDecoder
from dpl.serve.metrics import Gauges, Metrics
from dpl.serve.middleware import Tokens
from dpl.serve.session import ServerContext, SourceState, probe
from dpl.serve.settings import ServeSettings
from dpl.serve.store import StreamStore
from dpl.serve.writer import Writer

__all__ = ["Server", "open_server"]


@dataclass(frozen=True)
class Server:
    """Everything that the web application needs."""

    settings: ServeSettings
    engine: Engine
    decoders: DecoderPool
    metrics: Metrics
    tokens: Tokens | None
    about: dict[str, Any]

    @property
    def problems(self) -> list[str]:
        """The present problems, if there are any. They name neither streams nor folders: anyone may read them."""
        problems, failure = [], self.engine.context.writer.problem
        if failure is not None:
            adaptation = "goes on" if self.settings.on_storage_failure == "adapt" else "is paused"
            problems.append(f"the state folder cannot be written ({failure}); adaptation {adaptation}; retrying")
        refused = sum(stream.refused for stream in self.engine.streams())
        if refused:
            problems.append(f"{refused} streams started over, as no snapshot of theirs could be read; reset them")
        return problems

    def close(self) -> None:
        """Finish the queued jobs and write every stream to disk, as far as there is time."""
        self.engine.stop()
        self.decoders.close()


def open_server(
    make: Callable[[], AdaptiveModel],
    transform: Evaluation,
    shape: tuple[int, ...],
    settings: ServeSettings,
    *,
    names: Sequence[str] = (),
    tokens: Tokens | None = None,
    identity: Mapping[str, Any] | None = None,
) -> Server:
    """Open a server.

    `make` returns a new adaptive model at each call, `shape` is the shape of one image, `names` are the class names.
    `identity` has more that the state of a stream depends on; a state folder with other values is refused.
    """
    models = [make() for _ in range(settings.live_models)]
    probes = [probe(model, shape) for model in models]
    outputs, predicts_first = probes[0][0], all(first for _, first in probes)
    if names and len(names) != outputs:
        raise SettingError(f"{len(names)} class names for a network with {outputs} outputs; expected {outputs} names")
    about = {**_identity(models[0]), "input": list(shape), **(identity or {})}
    store, metrics = StreamStore(settings.state, about, settings.keep_snapshots), Metrics()
    context = ServerContext(
        settings=settings,
        source=SourceState(models[0].state_dict()),
        store=store,
        writer=Writer(store, metrics.note_written, settings.slow_disk),
        metrics=metrics,
        names=tuple(names),
        first=predicts_first if settings.answer == "auto" else settings.answer == "first",
    )
    engine = Engine(models, context, tokens.tenants if tokens else ("",))
    metrics.registry.register(Gauges(engine))
    decoders = DecoderPool(RequestDecoder(transform, shape, settings.max_batch, settings.max_pixels), settings)
    about |= {"shape": list(shape), "classes": list(names), "answers_first": context.first, "outputs": outputs}
    return Server(settings, engine, decoders, metrics, tokens, about)


def _identity(model: AdaptiveModel) -> dict[str, Any]:
    """Return what the state of a stream depends on; `dpl.load` needs the same to read a snapshot of one."""
    return {
        "source": model.fingerprint,
        "method": model.method.info.name,
        "settings": model.stored_settings(),
        "guard": None if model.guard is None else vars(model.guard.settings),
        "estimate": None if model.watch is None else vars(model.watch.settings),
        "classifier": model.network.classifier_name,
        "layout": "as_is",
    }
