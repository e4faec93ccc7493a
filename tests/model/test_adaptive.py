"""The library contract: wrap, predict, adapt, reset, save, load; and errors that leave no trace."""

import copy
import json
import threading

import pytest
import torch

import dpl
from nets import CLASSES, SmallNet, images, network


def states_equal(a: dict, b: dict) -> bool:
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


def test_a_call_predicts_and_adapts_and_reset_returns_to_the_source() -> None:
    model = dpl.adapt(network(), "dpl", confidence=0.3)
    logits = model(images())
    assert logits.shape == (8, CLASSES)
    assert not torch.equal(model.predict(images()), logits)  # it adapted
    assert model.last.updated is True
    assert 0 < model.last.confident <= 1
    assert model.last["classes"] >= 1
    model.reset()
    assert torch.equal(model.predict(images()), network()(images()))


def test_the_default_is_soft_dpl_under_the_guard() -> None:
    model = dpl.adapt(network())
    assert model.method.info.name == "dpl_soft"
    assert model.guard is not None
    assert dpl.adapt(network(), guard=False).guard is None


def test_a_named_method_has_no_guard_unless_asked() -> None:
    assert dpl.adapt(network(), "dpl_soft").guard is None
    assert dpl.adapt(network(), "dpl_soft", guard=True).guard is not None


def test_output_is_from_before_or_after_the_update() -> None:
    before = dpl.adapt(network(), "dpl", confidence=0.3)
    after = dpl.adapt(network(), "dpl", confidence=0.3, output="after")
    assert torch.equal(before(images()), network()(images()))
    assert torch.equal(after(images()), after.predict(images()))


def test_the_adapted_network_is_a_plain_one() -> None:
    model = dpl.adapt(network(), "dpl", confidence=0.3)
    model(images())
    plain = SmallNet()
    plain.load_state_dict(model.model.state_dict())
    assert torch.allclose(plain.eval()(images()), model.predict(images()), atol=1e-6)
    assert torch.allclose(model.model(images()), model.predict(images()), atol=1e-6)


def test_state_dict_is_a_copy() -> None:
    model = dpl.adapt(network(), "dpl", confidence=0.3)
    earlier = model.state_dict()
    frozen = copy.deepcopy(earlier)
    model(images())
    assert states_equal(earlier, frozen)
    model.load_state_dict(earlier)
    assert states_equal(model.state_dict(), frozen)


def test_the_regulariser_changes_affine_weights_only_through_the_gradient_of_the_memory() -> None:
    """With scope='affine' L_REG only reaches the network through the fresh batch mean."""

    def weights(**settings) -> torch.Tensor:
        common = {"scope": "affine", "confidence": 0.3, "lr": 1e-2, "optimizer": "sgd", "memory": "directions"}
        model = dpl.adapt(network(), "dpl", **common, **settings)
        model(images())
        return model.model.layer1[1].weight.detach().clone()

    without = weights(reg_weight=0.0)
    assert not torch.equal(weights(memory_grad=True), without)
    assert torch.allclose(weights(), without, atol=1e-7)


def test_dpl_loss_is_equation_7_on_the_memory_after_its_update() -> None:
    model = dpl.adapt(network(), "dpl", confidence=0.3, lr=0.0, reg_weight=0.7, momentum=0.6, temperature=0.2)
    features, w = [], network().fc.weight.detach()
    handle = model.model.fc.register_forward_pre_hook(lambda _m, args: features.append(args[0].detach()))
    logits = model(images())
    handle.remove()
    labels = dpl.objectives.confident_labels(logits, 0.3)
    memory = dpl.memory.update_class_memory(w, features[-1], labels, 0.6)
    expected = dpl.objectives.dpl_star(features[-1], w, labels, 0.2)
    expected = expected + 0.7 * dpl.objectives.prototype_regularization(w, memory, 0.2)
    assert model.last.loss == pytest.approx(float(expected), abs=1e-5)
    assert torch.allclose(model.method.term.memory, memory)


@pytest.mark.parametrize("method", ["dpl", "dpl_star", "dpl_o", "dpl_dagger", "pl"])
def test_no_confident_sample_changes_nothing(method: str) -> None:
    only = {} if method == "pl" else {"mixed_only": False}  # what is seen of the stream is state, too
    model = dpl.adapt(network(), method, confidence=1.0, **only)
    before = model.state_dict()
    model(images())
    assert model.last.updated is False
    no_class = "fewer than two classes among the confident samples"
    assert model.last.reason == ("no sample to learn from" if method == "pl" else no_class)
    assert states_equal(before, model.state_dict())


@pytest.mark.parametrize("method", ["dpl_star", "dpl_o"])
def test_samples_of_a_single_class_take_no_step(method: str) -> None:
    model = dpl.adapt(network(), method, confidence=0.0, mixed_only=False)
    before = model.state_dict()
    model(images(1).expand(4, -1, -1, -1).clone())
    assert model.last.updated is False
    assert states_equal(before, model.state_dict())


def test_a_batch_of_one_only_moves_the_memory() -> None:
    model = dpl.adapt(network(), "dpl", confidence=0.0, mixed_only=False)
    before = model.state_dict()
    model(images(1))
    assert model.last.updated is False
    after = model.state_dict()
    assert [key for key in before if not torch.equal(before[key], after[key])] == ["method.term.memory"]


def test_composition_adds_the_loss_on_the_same_pass() -> None:
    plain = dpl.adapt(network(), "tent", lr=0.0)
    both = dpl.adapt(network(), "tent+dpl", lr=0.0, dpl_confidence=0.3)
    alone = dpl.adapt(network(), "dpl", lr=0.0, confidence=0.3, scope="affine", norm="batch")
    for model in (plain, both, alone):
        model(images())
    assert both.last.loss == pytest.approx(plain.last.loss + alone.last.loss, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("source+dpl", "does not train by gradient"),
        ("norm+dpl", "does not train by gradient"),
        ("t3a+dpl", "does not train by gradient"),
        ("dpl_star+dpl", "uses the DPL loss already"),
    ],
)
def test_dpl_can_only_be_added_to_gradient_methods_without_its_loss(name: str, reason: str) -> None:
    with pytest.raises(dpl.SettingError, match=reason):
        dpl.adapt(network(), name)


def test_an_optimizer_can_be_given_as_a_function() -> None:
    model = dpl.adapt(network(), "tent", optimizer=lambda params: torch.optim.RMSprop(params, lr=1e-3))
    model(images())
    assert model.last.updated is True
    model.reset()
    assert states_equal(model.state_dict(), dpl.adapt(network(), "tent").state_dict())


class ElsewhereFlag(torch.Tensor):
    """A flag that says it is on a GPU, where reading it would make the device wait."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")

    def __bool__(self) -> bool:
        raise AssertionError("the flag was read")


@pytest.mark.parametrize("kind", [torch.Tensor, ElsewhereFlag])
def test_a_step_cancelled_by_a_tensor_changes_nothing(kind: type[torch.Tensor]) -> None:
    """A flag on the CPU is read; one elsewhere is passed to the fused kernel, here that of the CPU."""
    model = dpl.adapt(network(), "tent")
    model(images())
    before = model.state_dict()
    parameters = list(model.method.trainable.values())
    for flag in (False, True):
        loss = torch.stack([parameter.sum() for parameter in parameters]).sum()
        model.method.optimizer.step(loss, torch.tensor(flag).as_subclass(kind))
        assert states_equal(before, model.state_dict()) is not flag


def test_logits_and_weights_are_finite_under_autocast() -> None:
    model = dpl.adapt(network(), "dpl", confidence=0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(images())
    assert logits.isfinite().all()
    assert all(value.isfinite().all() for value in model.model.state_dict().values())


def test_a_change_of_dtype_includes_the_memory_and_the_source_weights() -> None:
    model = dpl.adapt(network(), "dpl", confidence=0.3)
    model(images())
    model.double()
    assert model(images().double()).dtype == torch.float64
    assert model.method.term.memory.dtype == torch.float64
    model.reset()
    assert model.model.fc.weight.dtype == torch.float64


def test_eval_and_train_change_no_prediction() -> None:
    model = dpl.adapt(network(), "tent")
    model.train()
    first = model(images())
    again = dpl.adapt(network(), "tent").eval()
    assert torch.equal(first, again(images()))


def test_calls_from_several_threads_raise_no_error() -> None:
    model = dpl.adapt(network(), "tent")
    errors: list[Exception] = []

    def work() -> None:
        try:
            for seed in range(10):
                model(images(seed=seed))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


BAD_INPUTS = {
    "not a tensor": (lambda: [[1.0]], "list"),
    "integers": (lambda: torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "uint8"),
    "another dtype": (lambda: images().double(), "float64"),
    "empty": (lambda: torch.zeros(0, 3, 8, 8), "non-empty"),
    "no batch dimension": (lambda: torch.zeros(8), "shape"),
    "NaN": (lambda: torch.cat([images(3), torch.full((1, 3, 8, 8), torch.nan)]), r"rows \[3\]"),
    "infinite": (lambda: torch.cat([torch.full((1, 3, 8, 8), torch.inf), images(3)]), r"rows \[0\]"),
    "another device": (lambda: images().to("meta"), "meta"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_is_refused_and_changes_nothing(case: str) -> None:
    make, word = BAD_INPUTS[case]
    model = dpl.adapt(network(), "dpl", confidence=0.3)
    model(images())
    before = model.state_dict()
    for call in (model, model.predict):
        with pytest.raises(dpl.InputError, match=word):
            call(make())
    assert states_equal(before, model.state_dict())


def test_a_wrong_channel_count_changes_nothing() -> None:
    model = dpl.adapt(network(), "dpl", confidence=0.3)
    before = model.state_dict()
    with pytest.raises(dpl.InputError, match="the network refused"):
        model(torch.rand(2, 4, 8, 8))
    assert states_equal(before, model.state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "dlp"}, "unknown method 'dlp'. Did you mean 'dpl'?"),
        ({"method": "tent+tent"}, "'tent' is not a loss that can be added"),
        ({"method": "tent+dlp"}, "unknown method 'tent+dlp'"),
        ({"confidense": 0.5}, "Did you mean 'confidence'?"),
        ({"confidence": 1.5}, "confidence=1.5: expected a number from 0 to 1"),
        ({"lr": "fast"}, "lr='fast' (str)"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 1.5}, "whole number"),
        ({"scope": "bn"}, "scope='bn': expected one of 'affine'"),
        ({"optimizer": "adagrad"}, "optimizer='adagrad'"),
        ({"style": "twice"}, "style='twice'"),
        ({"memory_grad": "maybe"}, "memory_grad='maybe'"),
    ],
)
def test_wrong_method_names_and_settings_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(dpl.SettingError) as caught:
        dpl.adapt(network(), **({"method": "dpl"} | arguments))
    assert message in str(caught.value)


def test_a_function_is_refused_as_a_network() -> None:
    with pytest.raises(dpl.SettingError, match=r"torch\.nn\.Module"):
        dpl.adapt(lambda x: x, "dpl")  # type: ignore[arg-type]


class TestSnapshot:
    def saved(self, tmp_path, **settings):
        model = dpl.adapt(network(), "dpl", confidence=0.3, **settings)
        model(images())
        return model, model.save(tmp_path / "snapshot")

    def test_a_loaded_snapshot_has_the_saved_state_and_continues_equally(self, tmp_path) -> None:
        model, folder = self.saved(tmp_path)
        loaded = dpl.load(folder, network())
        assert states_equal(model.state_dict(), loaded.state_dict())
        assert loaded.settings == model.settings
        assert torch.equal(model(images(seed=1)), loaded(images(seed=1)))

    def test_only_a_snapshot_is_overwritten(self, tmp_path) -> None:
        model, folder = self.saved(tmp_path)
        model.save(folder)
        (tmp_path / "precious").mkdir()
        (tmp_path / "precious" / "thesis.tex").write_text("...")
        with pytest.raises(dpl.SnapshotError, match="not a snapshot"):
            model.save(tmp_path / "precious")
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    def test_other_weights_are_refused(self, tmp_path) -> None:
        _, folder = self.saved(tmp_path)
        with pytest.raises(dpl.SnapshotError, match="other weights"):
            dpl.load(folder, network(seed=1))

    def test_another_architecture_is_refused(self, tmp_path) -> None:
        _, folder = self.saved(tmp_path)
        with pytest.raises(dpl.DplError):
            dpl.load(folder, network("tokens"))

    @pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
    def test_a_damaged_file_is_refused_by_name(self, tmp_path, name: str) -> None:
        _, folder = self.saved(tmp_path)
        whole = (folder / name).read_bytes()
        for broken in (whole[:-1], whole[: len(whole) // 2], b"", whole[:50] + b"?" + whole[51:]):
            (folder / name).write_bytes(broken)
            with pytest.raises(dpl.SnapshotCorrupt, match=name):
                dpl.load(folder, network())

    def test_a_pickle_is_refused_and_not_run(self, tmp_path) -> None:
        import pickle

        class Evil:
            def __reduce__(self):
                return (open, (str(tmp_path / "owned"), "w"))

        _, folder = self.saved(tmp_path)
        for name in ("state.safetensors", "manifest.json"):
            keep = (folder / name).read_bytes()
            (folder / name).write_bytes(pickle.dumps(Evil()))
            with pytest.raises(dpl.SnapshotCorrupt):
                dpl.load(folder, network())
            (folder / name).write_bytes(keep)
        assert not (tmp_path / "owned").exists()

    def test_an_empty_folder_is_no_snapshot(self, tmp_path) -> None:
        with pytest.raises(dpl.SnapshotError, match="not a snapshot"):
            dpl.load(tmp_path, network())

    def test_functions_must_be_given_again(self, tmp_path) -> None:
        factory = torch.optim.SGD
        model = dpl.adapt(network(), "tent", optimizer=lambda params: factory(params, 0.1))
        model(images())
        folder = model.save(tmp_path / "snapshot")
        with pytest.raises(dpl.SnapshotError, match="optimizer"):
            dpl.load(folder, network())
        assert dpl.load(folder, network(), optimizer=lambda params: factory(params, 0.1)).last.updated is False

    def test_the_manifest_holds_method_settings_and_checksums(self, tmp_path) -> None:
        _, folder = self.saved(tmp_path)
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["method"] == "dpl"
        assert manifest["settings"]["confidence"] == 0.3
        assert manifest["files"]["state.safetensors"]["sha256"]

    def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(self) -> None:
        model = dpl.adapt(network(), "dpl")
        before = model.state_dict()
        other = dpl.adapt(network(), "tent").state_dict()
        broken = {key: value for key, value in before.items() if key != "method.term.memory"}
        for state in (other, broken, {}, before | {"extra": torch.zeros(1)}):
            with pytest.raises(dpl.SnapshotError):
                model.load_state_dict(state)
        assert states_equal(before, model.state_dict())
