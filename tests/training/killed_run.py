"""Run as a script, `killed_run.py DATA OUT` trains by SPEC once for each moment and is killed there with SIGKILL.

Each run is a process of its own, forked before anything was computed, so that the imports are paid for once.
"""

import os
import signal
import sys
import warnings
from pathlib import Path

from dpl.training import TrainSpec, train
from dpl.training.run import RunFolder

SPEC = TrainSpec(
    dataset="PACS", target="sketch", network="debug_cnn", size=32, steps=7, lr=1e-2, per_domain=8, eval_every=3
)

MOMENTS = {
    "after_step_4": "a step between two saves is done",
    "writing_best": "the first best weights are written, but not yet under their name",
    "between_renames": "the old state is out of the way, the new one not yet in its place",
    "before_result": "all steps are done, the result is not noted",
}


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


def train_until(moment, data, out):
    on_step = None
    if moment == "after_step_4":
        on_step = lambda step, *_: die() if step == 4 else None  # noqa: E731
    elif moment == "writing_best":
        die_when_best_is_renamed()
    elif moment == "between_renames":
        die_between_renames()
    elif moment == "before_result":
        RunFolder.finish = die
    warnings.simplefilter("ignore")
    train(SPEC, data=data, out=out, on_step=on_step)


def main(data, root):
    for moment in MOMENTS:
        child = os.fork()
        if child == 0:
            train_until(moment, data, Path(root, moment))
            os._exit(0)
        print(moment, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
