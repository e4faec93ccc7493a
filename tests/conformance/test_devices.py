"""Every method stays on its device and asks the host for no more than it declares; shown on `meta`, without a GPU."""

from typing import Any

import pytest
import torch

import dpl
from conformance.operations import HostReads, run_on_meta
from conformance.subjects import labelled, names, subject
from dpl import views
from dpl.estimate import Watch
from dpl.guard import Guard
from dpl.guard.inputs import CONSTANT, RowCheckResult
from dpl.methods import get_method
from dpl.testing import Subject
from dpl.views import seeded
from nets import images, network

# The batch is checked by two numbers, read together.
OWN_CHECK = 1


NAMES = names()
META = torch.device("meta")
WATCHED = ("tent", "dpl", "lame")  # one whose images influence each other, one where they do not, one without weights
VIEWS = [
    views.cotta_view, views.rmt_view, views.roid_view, views.adacontrast_weak_view, views.adacontrast_strong_view,
    views.memo_view,
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_step_reads_what_its_method_declares(name: str) -> None:
    run = run_on_meta(subject(name))
    assert run.step.total() == get_method(name).info.host_reads + OWN_CHECK, dict(run.step)
    assert run.predict.total() == OWN_CHECK, dict(run.predict)


@pytest.mark.parametrize("name", NAMES)
def test_a_guarded_step_reads_once_more(name: str) -> None:
    run = run_on_meta(subject(name, guard=True))
    assert run.step.total() == get_method(name).info.host_reads + OWN_CHECK + Guard.host_reads, dict(run.step)
    assert run.predict.total() == OWN_CHECK + Guard.host_reads, dict(run.predict)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_the_estimate_watches_reads_no_more(name: str) -> None:
    run = run_on_meta(subject(name, calibrate=labelled()))
    assert run.step.total() == get_method(name).info.host_reads + OWN_CHECK + Watch.host_reads, dict(run.step)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_can_be_made_on_the_device(name: str) -> None:
    one = subject(name)
    with HostReads():
        source = one.source and [(batch.to(META), labels.to(META)) for batch, labels in one.source]
        watched = {"guard": True, "calibrate": [tuple(column.to(META) for column in labelled())]}
        settings = {**one.settings, **(watched if name in WATCHED else {})}
        there = Subject(name, one.network.to(META), [batch.to(META) for batch in one.batches], settings, source)
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
    assert run_on_meta(subject(name, kind)).step.total() == OWN_CHECK


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
    assert (away.device, away.shape, host.reads.total()) == (META, on_host.shape, 0)
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


def guarded(name: str = "tent", batches: int = 2, **guard: Any) -> dpl.AdaptiveModel:
    watched = {"calibrate": labelled(), "estimate": {"share": 0.1, "least_shift": 0.0}}  # random images have no shift
    model = subject(name, guard=guard, **watched).adapt()
    for i in range(batches):
        model(images(64, seed=i))
    return model


def reads_of_a_step(model: dpl.AdaptiveModel) -> int:
    model.to(META)
    with HostReads() as host:
        assert model(images(64).to(META)).device == META
    return host.reads.total()


@pytest.mark.parametrize("name", WATCHED)
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("credit", [0.0, 1e6], ids=["not compared", "compared"])
def test_every_kind_of_guarded_batch_is_read_once(name: str, frozen: bool, credit: float) -> None:
    model = guarded(name, batches=5, surprise=1e9)
    model.watch.credit = credit
    model.guard.evidence.switch(frozen)
    looks = model.watch.looks
    assert reads_of_a_step(model) == OWN_CHECK + Guard.host_reads
    assert model.watch.looks - looks == int(credit > 0)


@pytest.mark.parametrize("name", WATCHED)
def test_excluded_images_are_taken_out_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = guarded(name)
    found = RowCheckResult({1: "not finite", 4: "too large"}, {2: CONSTANT, 7: CONSTANT}, 1.0)
    monkeypatch.setattr(model.guard.rows, "examine", lambda _: found)
    assert reads_of_a_step(model) == Guard.host_reads
    assert model.guard.counts["set_aside"] == model.guard.counts["not_learnt"] == 2


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
def test_a_freeze_on_the_device_puts_back_what_was_kept_on_the_cpu() -> None:
    here, there = (guarded("dpl", allowance=0.0) for _ in range(2))
    here.guard._keep_good_state(here.state)
    here.guard.evidence.lost = here.guard.settings.limit
    there.to(META)
    there.load_state_dict(here.state_dict())
    with HostReads():
        there(images(64).to(META))
    assert "last good state" in there.guard.events[-1].reason
    assert there.guard.frozen


def test_the_estimate_is_read_once() -> None:
    model = guarded()
    model.to(META)
    with HostReads() as host:
        assert model.estimate().accuracy is not None
    assert host.reads.total() == 1


def _reads(name: str, **settings: Any) -> int:
    return run_on_meta(subject(name, **settings)).step.total()
