"""RoTTA against a trace of the RMT library."""

import numpy as np
import torch

import dpl
from dpl.memory.bank import occupied_by_age
from parity.tiny import (
    Roll,
    project,
    require_same_classes,
    require_the_trace,
    run,
    stream,
    teacher_and_model,
    tiny_network,
    trace,
    with_unused_buffers,
)

NAME = "rmtlib_rotta_roll"


def adapted(dtype: torch.dtype = torch.float64) -> dpl.AdaptiveModel:
    return dpl.adapt(tiny_network(dtype), "rotta", augment=Roll())


def our_name(traced: str) -> str:
    return teacher_and_model(traced).replace("source_mean", "running_mean").replace("source_var", "running_var")


def test_equals_the_trace() -> None:
    require_the_trace(NAME, adapted(), 1e-9, rename=our_name, complete=with_unused_buffers)


def test_the_bank_holds_the_traced_samples_in_the_traced_order() -> None:
    adaptive, expected = adapted(), trace(NAME)
    run(adaptive, stream())
    bank, everything = adaptive.method, torch.cat(stream())
    order = occupied_by_age(bank.slots)
    assert torch.equal(bank.samples[order], everything[torch.from_numpy(expected["final/mem_stream_index"])])
    assert bank.labels[order].tolist() == expected["final/mem_label"].tolist()
    assert bank.ages[order].tolist() == expected["final/mem_age"].tolist()
    uncertainty = project("mem_uncertainty", bank.uncertainty[order].numpy())
    assert np.abs(uncertainty - expected["final/mem_uncertainty"]).max() < 1e-9


def test_same_classes_in_single_precision() -> None:
    require_same_classes(NAME, adapted(torch.float32), margin=1e-2, least=0.95)
