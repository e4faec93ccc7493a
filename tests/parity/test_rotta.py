"""RoTTA against a trace of the RMT library."""

import numpy as np
import torch
from torch import Tensor

import dpl
from dpl.memory.bank import occupied_by_age
from parity.tiny import (
    Roll,
    largest_state_difference,
    logits_difference,
    project,
    run,
    same_classes,
    stream,
    teacher_and_model,
    tiny_network,
    trace,
)

NAME = "rmtlib_rotta_roll"


def adapted(dtype: torch.dtype = torch.float64) -> dpl.AdaptiveModel:
    return dpl.adapt(tiny_network(dtype), "rotta", augment=Roll())


def our_name(traced: str) -> str:
    return teacher_and_model(traced).replace("source_mean", "running_mean").replace("source_var", "running_var")


def with_unused_buffers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The library's layers have buffers target_mean (zeros) and target_var (ones) that nothing uses."""
    unused = {key.replace("running", "target"): torch.zeros_like(state[key]) for key in state if "running_mean" in key}
    unused |= {key.replace("running", "target"): torch.ones_like(state[key]) for key in state if "running_var" in key}
    return state | unused


def test_equals_the_trace() -> None:
    logits, _ = run(adapted(), stream())
    assert logits_difference(NAME, logits) < 1e-9


def test_state_after_the_first_batch_equals_the_trace() -> None:
    adaptive = adapted()
    adaptive(stream()[0])
    assert largest_state_difference(NAME, with_unused_buffers(adaptive.state_dict()), rename=our_name) < 1e-9


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
    logits, _ = run(adapted(torch.float32), stream(torch.float32))
    clear, equal = same_classes(logits, trace(NAME)["logits"], margin=1e-2)
    assert clear > 0.95
    assert equal == 1
