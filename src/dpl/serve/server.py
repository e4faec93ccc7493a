"""Puts a server together: live models, streams, store, metrics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dpl.core.errors import SettingError
from dpl.data.transforms import Evaluation
from dpl.model.adaptive import AdaptiveModel
from dpl.serve.decoders import DecoderPool
from dpl.serve.engine import Engine
from dpl.serve.images import RequestDecoder
from dpl.serve.metrics import Gauges, Metrics
from dpl.serve.middleware import Tokens
from dpl.serve.session import ServerContext, SourceState, like_model, predicts_first
from dpl.serve.settings import ServeSettings
from dpl.serve.store import StreamStore
from dpl.serve.writer import Writer

__all__ = ["Server", "open_server"]

_PROBE_IMAGES = 8


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
        self.engine.stop(self.settings.stop_seconds)
        self.decoders.close()


def open_server(
    make: Callable[[], AdaptiveModel],
    transform: Evaluation,
    shape: tuple[int, ...],
    settings: ServeSettings,
    *,
    names: Sequence[str] = (),
    tokens: Tokens | None = None,
) -> Server:
    """Open a server.

    `make` returns a new adaptive model at each call, `shape` is the shape of one image, `names` are the class names.
    """
    models = [make() for _ in range(settings.live_models)]
    first = all([_warm_up(model, shape) for model in models])
    source = models[0].state_dict()
    about = {**_identity(models[0]), "input": list(shape)}
    store = StreamStore(settings.state, about, settings.keep_snapshots)
    metrics = Metrics()
    context = ServerContext(
        settings=settings,
        source=SourceState(source),
        store=store,
        writer=Writer(store, metrics.note_written, settings.slow_disk),
        metrics=metrics,
        names=tuple(names),
        first=first if settings.answer == "auto" else settings.answer == "first",
    )
    engine = Engine(models, context, tokens.tenants if tokens else ("",))
    metrics.registry.register(Gauges(engine))
    decoder = RequestDecoder(transform, shape, settings.max_batch, settings.max_pixels)
    decoders = DecoderPool(decoder, settings)
    about |= {"shape": list(shape), "classes": list(names), "answers_first": context.first,
              "outputs": _outputs(names, models[0], shape)}  # fmt: skip
    return Server(settings, engine, decoders, metrics, tokens, about)


def _warm_up(model: AdaptiveModel, shape: tuple[int, ...]) -> bool:
    """Run the model once, so that its classifier is found; return whether it predicts before it adapts."""
    images = torch.rand(_PROBE_IMAGES, *shape, generator=torch.Generator().manual_seed(0))
    return predicts_first(model, images)


def _outputs(names: Sequence[str], model: AdaptiveModel, shape: tuple[int, ...]) -> int:
    """Return the number of classes; the names must be as many."""
    outputs: int = model.predict(like_model(torch.zeros(1, *shape), model)).shape[1]
    if names and len(names) != outputs:
        raise SettingError(f"{len(names)} class names for a network with {outputs} outputs; expected {outputs} names")
    return outputs


def _identity(model: AdaptiveModel) -> dict[str, Any]:
    """Return what the state of a stream depends on; `dpl.load` needs the same to read a snapshot of one."""
    return {
        "source": model.fingerprint,
        "method": model.method.info.name,
        "settings": model.stored_settings(),
        "guard": None if model.guard is None else vars(model.guard.settings),
        "classifier": model.network.classifier_name,
        "layout": "as_is",
    }
