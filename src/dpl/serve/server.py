"""The parts of a server put together: live models, streams, store, metrics."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from dpl.core.errors import SettingError
from dpl.data.transforms import Evaluation
from dpl.model.adaptive import AdaptiveModel
from dpl.serve.delta import SourceState
from dpl.serve.engine import Engine
from dpl.serve.images import Intake
from dpl.serve.metrics import Gauges, Metrics
from dpl.serve.security import Tokens
from dpl.serve.session import Context, answers_first
from dpl.serve.settings import ServeSettings
from dpl.serve.shard import WHOLE, Shard
from dpl.serve.store import StreamStore
from dpl.serve.writer import Writer

__all__ = ["Server", "open_server"]

_PROBE_IMAGES = 8
_DECODERS = 2


@dataclass(frozen=True)
class Server:
    """Everything that answers requests need."""

    settings: ServeSettings
    engine: Engine
    intake: Intake
    metrics: Metrics
    tokens: Tokens | None
    decoders: ThreadPoolExecutor
    about: dict[str, Any]

    @property
    def problems(self) -> list[str]:
        """What is wrong at present; empty when nothing is."""
        problem = self.engine.context.writer.problem
        if problem is None:
            return []
        goes_on = "adaptation goes on" if self.settings.on_storage_failure == "adapt" else "adaptation is paused"
        return [f"the state folder cannot be written ({problem}); {goes_on}, snapshots are retried"]

    def close(self) -> None:
        """Finish what is queued and put every stream on the disk."""
        self.engine.stop()
        self.decoders.shutdown()


def open_server(
    make: Callable[[], AdaptiveModel],
    transform: Evaluation,
    shape: tuple[int, ...],
    settings: ServeSettings,
    *,
    names: Sequence[str] = (),
    tokens: Tokens | None = None,
    shard: Shard = WHOLE,
) -> Server:
    """Make a server; `make` gives a fresh adaptive model at each call, `shape` is that of one image.

    With a `shard` it is one part of a divided server and takes the streams of that part alone.
    """
    models = [make() for _ in range(settings.live_models)]
    first = all([_warm_up(model, shape) for model in models])
    source = models[0].state_dict()
    _check_names(names, models[0], shape)
    about = _identity(models[0])
    store = StreamStore(settings.state, about, settings.keep_snapshots, shard)
    metrics = Metrics()
    context = Context(
        settings=settings,
        source=SourceState(source),
        store=store,
        writer=Writer(store, metrics.note_written),
        metrics=metrics,
        names=tuple(names),
        first=first if settings.answer == "auto" else settings.answer == "first",
    )
    engine = Engine(models, context)
    metrics.registry.register(Gauges(engine.streams, engine.facts))
    intake = Intake(transform, shape, settings.max_batch, settings.max_pixels)
    about |= {"shape": list(shape), "classes": list(names), "answers_first": context.first}
    decoders = ThreadPoolExecutor(_DECODERS, thread_name_prefix="dpl-serve-decoder")
    return Server(settings, engine, intake, metrics, tokens, decoders, about)


def _warm_up(model: AdaptiveModel, shape: tuple[int, ...]) -> bool:
    """Let the model meet images once, so that its classifier is found; leaves it as it was."""
    images = torch.rand(_PROBE_IMAGES, *shape, generator=torch.Generator().manual_seed(0))
    return answers_first(model, images)


def _check_names(names: Sequence[str], model: AdaptiveModel, shape: tuple[int, ...]) -> None:
    like = next(model.model.parameters())
    outputs = model.predict(torch.zeros(1, *shape, device=like.device, dtype=like.dtype)).shape[1]
    if names and len(names) != outputs:
        raise SettingError(f"{len(names)} class names for a network with {outputs} outputs; expected as many")


def _identity(model: AdaptiveModel) -> dict[str, Any]:
    """Return what a stream's state belongs to: other weights, method or settings make it useless."""
    return {
        "source": model.fingerprint,
        "method": model.method.info.name,
        "settings": model.stored_settings(),
        "guard": None if model.guard is None else vars(model.guard.settings),
    }
