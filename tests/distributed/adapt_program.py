"""Adapts one network to one stream, each process with its part of every batch, and saves what came of it."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from distributed.subjects import CASES, make_network, make_source, make_stream
from dpl import distributed


def main(out: Path, *names: str) -> None:
    torch.set_num_threads(1)
    with distributed.started() as team:
        for name in names or CASES:
            method, settings, kind = CASES[name]
            options = {key: value for key, value in settings.items() if key != "source"}
            source = make_source() if "source" in settings else None
            model = distributed.adapt(make_network(kind), method, source=source, **options)
            logits = [model(batch[team.rows(len(batch))]) for batch in make_stream()]
            state = model.state_dict() | {f"logits.{i}": rows for i, rows in enumerate(logits)}
            save_file({key: value.contiguous() for key, value in state.items()}, out / f"{name}.{team.rank}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
