"""Run as a script, `killed_run.py DATA OUT MOMENT` trains by SPEC and kills itself with SIGKILL at the moment named."""

import os
import signal
import sys
import warnings
from pathlib import Path

from dpl.training import TrainSpec, train
from dpl.training import loop as loop_module

SPEC = TrainSpec(
    dataset="PACS", target="sketch", network="debug_cnn", size=32, steps=7, lr=1e-2, per_domain=8, eval_every=3
)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def die_when_best_is_renamed():
    real, improved = os.replace, []

    def replace(draft, path):
        if Path(path).name == "best.safetensors":
            improved.append(path)
            if len(improved) == 1:
                die()
        real(draft, path)

    os.replace = replace


def die_between_renames():
    real = Path.rename

    def rename(self, target):
        moved = real(self, target)
        if Path(target).name == ".last.previous":
            die()
        return moved

    Path.rename = rename


def main(data, out, moment):
    on_step = None
    if moment == "after_step_4":
        on_step = lambda report: die() if report.step == 4 else None  # noqa: E731
    elif moment == "writing_best":
        die_when_best_is_renamed()
    elif moment == "between_renames":
        die_between_renames()
    elif moment == "before_result":
        loop_module._finish = die
    warnings.simplefilter("ignore")
    train(SPEC, data=data, out=out, on_step=on_step)


if __name__ == "__main__":
    main(*sys.argv[1:])
