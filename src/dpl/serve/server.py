"""Puts a server together: live models, streams, store, metrics."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpl.core.errors import SettingError
from dpl.data.transforms import Evaluation
from dpl.model.adaptive import AdaptiveModel
from dpl.serve.decoding import DecoderPool, RequestDecoder
from dpl.serve.engine import Engine
from dpl.serve.live import SourceState, probe
from dpl.serve.middleware import Tokens
from dpl.serve.monitoring import Metrics
from dpl.serve.settings import ServeSettings
from dpl.serve.store import StreamStore, Writer

__all__ = ["Server"]


class Server:
    """Everything that the parts of a server share.

    `make` returns a new adaptive model at each call, `shape` is the shape of one image, `names` are the class names.
    `identity` has more that the state of a stream depends on; a state folder with other values is refused.
    """

    def __init__(
        self,
        make: Callable[[], AdaptiveModel],
        transform: Evaluation,
        shape: tuple[int, ...],
        settings: ServeSettings,
        *,
        names: Sequence[str] = (),
        tokens: Tokens | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        models = [make() for _ in range(settings.live_models)]
        probes = [probe(model, shape) for model in models]
        outputs, first = probes[0][0], all(before for _, before in probes)
        if names and len(names) != outputs:
            raise SettingError(f"{len(names)} class names for a network with {outputs} outputs; expected {outputs}")
        self.settings, self.tokens, self.names = settings, tokens, tuple(names)
        self.first = first if settings.answer == "auto" else settings.answer == "first"  # respond, then adapt
        self.about = {**models[0].identity(), "layout": "as_is", "input": list(shape), **(identity or {})}
        self.store, self.metrics = StreamStore(settings.state, self.about, settings.keep_snapshots), Metrics(self)
        self.about |= {"shape": list(shape), "classes": list(names), "answers_first": self.first, "outputs": outputs}
        self.source, self.step_seconds = SourceState(models[0].state_dict()), 0.0  # of one adaptation, smoothed
        self.writer = Writer(self.store, self.metrics, settings.slow_disk)
        self.decoders = DecoderPool(RequestDecoder(transform, shape, settings.max_batch, settings.max_pixels), settings)
        self.engine = Engine(models, self)

    @property
    def problems(self) -> list[str]:
        """The present problems, if there are any. They name neither streams nor folders: anyone may read them."""
        problems, failure = [], self.writer.problem
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
