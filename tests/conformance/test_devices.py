"""Every method stays on its device and asks the host for no more than it declares; shown on `meta`, without a GPU."""

from typing import Any

import pytest
import torch

import dpl
from conformance.subjects import names, subject
from dpl import views
from dpl.methods import get_method
from dpl.testing import HostReads, Subject, run_on_meta
from dpl.views import seeded
from nets import images, network

# The batch is checked by two numbers, read together.
OWN_CHECK = 1


NAMES = names()
META = torch.device("meta")
VIEWS = [
    views.cotta_view, views.rmt_view, views.roid_view, views.adacontrast_weak_view, views.adacontrast_strong_view,
    views.memo_view,
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_step_reads_what_its_method_declares(name: str) -> None:
    run = run_on_meta(subject(name))
    assert run.host_reads == get_method(name).info.host_reads + OWN_CHECK, dict(run.step_reads)
    assert run.predict_reads.total() == OWN_CHECK, dict(run.predict_reads)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_can_be_made_on_the_device(name: str) -> None:
    one = subject(name)
    with HostReads():
        source = one.source and [(batch.to(META), labels.to(META)) for batch, labels in one.source]
        there = Subject(name, one.network.to(META), [batch.to(META) for batch in one.batches], one.settings, source)
        model = there.adapt()
        assert all(logits.device == META for logits in there.run(model, 2))
        model.reset()


@pytest.mark.parametrize("name", ["tent", "dpl", "tent+dpl"])
@pytest.mark.parametrize("norm", ["running", "batch", "track", 0.3, "auto", "median", "unmix", "renorm"])
def test_norm_rules_read_nothing(name: str, norm: str | float) -> None:
    once = 1 if norm == "auto" else 0  # whether to start again, until samples are first seen to be correlated
    assert _reads(name, norm=norm) == OWN_CHECK + once


@pytest.mark.parametrize("style", ["two_pass", "carry_over"])
@pytest.mark.parametrize("style_from", ["unconfident", "all", "confident"])
@pytest.mark.parametrize("name", ["dpl_o", "dpl"])
def test_style_transfer_reads_nothing(name: str, style: str, style_from: str) -> None:
    assert _reads(name, style=style, style_from=style_from) == OWN_CHECK


@pytest.mark.parametrize("kind", ["group", "bottleneck", "parametrized", "tokens", "wrapped"])
@pytest.mark.parametrize("name", ["dpl_dagger", "tent", "t3a"])
def test_other_networks_follow_to_the_device(kind: str, name: str) -> None:
    assert run_on_meta(subject(name, kind)).host_reads == OWN_CHECK


@pytest.mark.parametrize("settings", [{"steps": 2}, {"output": "after"}, {"adapt_every": 2}, {"min_selected": 0.5}])
def test_shared_settings_read_nothing(settings: dict[str, Any]) -> None:
    assert _reads("dpl", **settings) == OWN_CHECK


@pytest.mark.parametrize("make", VIEWS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("per_sample", [True, False])
@pytest.mark.parametrize("size", [8, 96])
def test_views_stay_on_their_device_and_draw_on_the_host(make: Any, per_sample: bool, size: int) -> None:
    states = []

    def then_look(view: Any) -> Any:
        def run(batch: torch.Tensor) -> torch.Tensor:
            seen: torch.Tensor = view(batch)
            states.append(torch.get_rng_state())
            return seen

        return run

    view = seeded(then_look(make(per_sample=per_sample)), 3)
    on_host = view(images(4, size=size))
    with HostReads() as host:
        away = view(images(4, size=size).to(META))
    assert (away.device, away.shape, host.total) == (META, on_host.shape, 0)
    assert torch.equal(*states), "another number of draws on another device"


@pytest.mark.parametrize("name", ["adacontrast", "cotta", "note", "rmt", "swr_nsp", "tast"])
def test_draws_do_not_depend_on_the_device(name: str) -> None:
    one = subject(name)
    here, there = one.adapt(), one.adapt()
    one.run(here, 1), one.run(there, 1)
    there.to(META)
    one.run(here, 2)
    with HostReads():
        Subject(name, one.network, [batch.to(META) for batch in one.batches]).run(there, 2)
    assert torch.equal(here.state_dict()["generator"], there.state_dict()["generator"])


@pytest.mark.parametrize("name", ["tent", "cotta", "rotta"])
def test_reset_works_after_a_move(name: str) -> None:
    one = subject(name)
    model = one.adapt()
    before = model.state_dict()["generator"]
    one.run(model, 2)
    model.to(META)
    model.reset()
    assert torch.equal(model.state_dict()["generator"], before)


def test_the_caller_s_own_optimizer_costs_a_read() -> None:
    reads = _reads("tent", optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3))
    assert reads == OWN_CHECK + 1


def test_a_mixture_of_devices_is_found() -> None:
    model = dpl.adapt(network(), "tent+dpl")
    model(images())
    model.to(META)
    model.method.dpl.memory = torch.zeros(5, 16)  # type: ignore[attr-defined]
    with HostReads(), pytest.raises(RuntimeError, match="device"):
        model(images().to(META))


def _reads(name: str, **settings: Any) -> int:
    one = subject(name)
    return run_on_meta(Subject(name, one.network, one.batches, {**one.settings, **settings}, one.source)).host_reads
