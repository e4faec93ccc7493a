"""An exported model predicts as the adapted one does, without dpl."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import dpl
from conformance.subjects import names, subject
from dpl.demo.digits import load_source_network, uci_digits
from dpl.model.export import reason_not_to_export
from nets import SmallNet, images, network


def share_correct(model: nn.Module, stream: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float((model(stream).argmax(dim=1) == labels).float().mean())


def plain(state: dict[str, Tensor], kind: nn.Module) -> nn.Module:
    kind.load_state_dict(state)
    return kind.eval()


def test_the_export_keeps_what_adaptation_gained(tmp_path: Path) -> None:
    stream, labels = uci_digits()
    order = torch.randperm(len(stream), generator=torch.Generator().manual_seed(0))  # else it is sorted by writer
    stream, labels = stream[order], labels[order]
    source, _ = load_source_network()
    model = dpl.adapt(source, "tent")
    for part in stream[:512].split(64):
        model(part)
    rest, answers = stream[512:1024].split(64), labels[512:1024].split(64)
    adapted = sum(share_correct(model.predict, *pair) for pair in zip(rest, answers, strict=True)) / 8
    alone = plain(model.model.state_dict(), copy.deepcopy(source))
    exported = plain(load_file(model.export(tmp_path / "out")), source)
    assert share_correct(exported, torch.cat(rest), torch.cat(answers)) > adapted - 0.02
    assert share_correct(alone, torch.cat(rest), torch.cat(answers)) < adapted - 0.05


@pytest.mark.parametrize("method", ["source", "dpl", "t3a", "rotta"])
@pytest.mark.parametrize("kind", ["batch", "weight_norm", "parametrized"])
def test_fixed_statistics_are_exported_exactly(tmp_path: Path, method: str, kind: str) -> None:
    one = subject(method, kind)
    model = one.adapt()
    one.run(model, 5)
    found = model.export(tmp_path / "a.safetensors")
    again = plain(load_file(found), network(kind))
    with torch.no_grad():
        assert torch.allclose(again(images()), model.predict(images()), atol=1e-5)
    assert (found.agreement, found.images) == (1.0, 8)
    assert found.statistics == "running statistics"


def test_batch_statistics_are_averaged_over_recent_batches(tmp_path: Path) -> None:
    model = dpl.adapt(network(), "norm")
    batches = [images(8, seed=i) for i in range(4)]
    for batch in batches:
        model(batch)
    state = load_file(model.export(tmp_path / "a.safetensors"))
    first = network().layer1[0]
    means = torch.stack([first(batch).mean(dim=(0, 2, 3)) for batch in batches])
    variances = torch.stack([first(batch).var(dim=(0, 2, 3)) for batch in batches])
    assert torch.allclose(state["layer1.1.running_mean"], means.mean(dim=0), atol=1e-5)
    assert torch.allclose(state["layer1.1.running_var"], variances.mean(dim=0), atol=1e-5)
    assert torch.equal(model.model.layer1[1].running_mean, network().layer1[1].running_mean)  # its own are untouched


def test_a_blend_is_exported_as_a_blend(tmp_path: Path) -> None:
    model = dpl.adapt(network(), "norm", norm=0.25)
    model(images())
    state, source = load_file(model.export(tmp_path / "a.safetensors")), network().layer1
    expected = torch.lerp(source[1].running_mean, source[0](images()).mean(dim=(0, 2, 3)), 0.25)
    assert torch.allclose(state["layer1.1.running_mean"], expected, atol=1e-5)


def test_averages_do_not_change_a_prediction_and_survive_a_snapshot(tmp_path: Path) -> None:
    model = dpl.adapt(network(), "tent", norm="batch")
    model(images())
    model.predict(images(seed=9))  # does not count
    model.save(tmp_path / "s")
    again = dpl.load(tmp_path / "s", network())
    first, second = model.export(tmp_path / "a.safetensors"), again.export(tmp_path / "b.safetensors", images=images())
    one, two = load_file(first), load_file(second)
    assert all(torch.equal(one[key], two[key]) for key in one)
    model.reset()
    source = load_file(model.export(tmp_path / "c.safetensors"))
    assert all(torch.equal(source[key], value) for key, value in network().state_dict().items())


@pytest.mark.parametrize("method", ["lame", "tast", "tast_bn", "tent_prebn", "domainadaptor", "rmt", "roid", "note"])
def test_what_cannot_be_a_plain_network_is_refused_with_the_reason(tmp_path: Path, method: str) -> None:
    one = subject(method)
    model = one.adapt()
    with pytest.raises(dpl.ModelError, match=rf"'{method}' cannot be exported: .*model\.save"):
        model.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", names())
def test_every_method_exports_or_says_why_not(tmp_path: Path, name: str) -> None:
    one = subject(name)
    model = one.adapt()
    one.run(model, 3)
    if reason_not_to_export(model.method):
        with pytest.raises(dpl.ModelError, match="cannot be exported: "):
            model.export(tmp_path / "a.safetensors")
        return
    result = model.export(tmp_path / "a.safetensors")
    assert result.agreement is not None
    plain(load_file(result), SmallNet())


def test_a_folder_gets_the_file_and_keeps_its_others(tmp_path: Path) -> None:
    model = dpl.adapt(network(), "norm")
    model(images())
    result = model.export(tmp_path / "out")
    assert result.path == tmp_path / "out" / "model.safetensors"
    assert result.statistics == "statistics of 1 recent batches"
    (tmp_path / "out" / "a.jpg").write_text("mine")
    before = result.path.read_bytes()
    model(images(seed=1))
    model.export(tmp_path / "out")  # an older export is replaced
    assert result.path.read_bytes() != before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.jpg", "model.safetensors"]


def test_foreign_files_and_wrong_formats_are_refused(tmp_path: Path) -> None:
    model = dpl.adapt(network(), "dpl")
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(dpl.SettingError, match="or a folder"):
        model.export(tmp_path / "notes")
    with pytest.raises(dpl.SettingError, match="expected one of 'state_dict', 'onnx', 'torch_export'"):
        model.export(tmp_path / "out", "tflite")
    with pytest.raises(dpl.SettingError, match=r"ends in \.onnx"):
        model.export(tmp_path / "a.safetensors", "onnx")
    with pytest.raises(dpl.InputError, match="pass images=, or predict a batch first"):
        model.export(tmp_path / "out", "torch_export")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("notes", "mine")]


WITHOUT_DPL = """
import sys, torch
sys.modules["dpl"] = None  # importing it would fail
program = torch.export.load(sys.argv[1]).module()
torch.save(program(torch.load(sys.argv[2], weights_only=True)), sys.argv[3])
"""


def test_a_program_runs_without_dpl_on_any_batch_size(tmp_path: Path) -> None:
    model = dpl.adapt(network(), "tent", norm="batch")
    model(images())
    result = model.export(tmp_path / "out", "torch_export")
    torch.save(images(3), tmp_path / "images.pt")
    words = [os.fspath(result), str(tmp_path / "images.pt"), str(tmp_path / "logits.pt")]
    subprocess.run([sys.executable, "-c", WITHOUT_DPL, *words], check=True, cwd=tmp_path, timeout=120)
    state = plain(load_file(model.export(tmp_path / "a.safetensors")), SmallNet())
    logits = torch.load(tmp_path / "logits.pt", weights_only=True)
    assert torch.allclose(logits, state(images(3)), atol=1e-5)


def test_onnx_runs_in_onnxruntime(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
    pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
    model = dpl.adapt(network(), "t3a")
    model(images())
    result = model.export(tmp_path / "out", "onnx")
    (logits,) = runtime.InferenceSession(str(result.path)).run(["logits"], {"images": images(3).numpy()})
    assert torch.allclose(torch.from_numpy(logits), model.predict(images(3)), atol=1e-4)
    assert result.agreement == 1.0


DATA = Path(os.environ.get("DPL_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


@pytest.mark.shared
@pytest.mark.skipif(not DATA.is_dir(), reason=f"needs CIFAR-10 and a ResNet-20 in {DATA}")
def test_tent_on_corrupted_cifar_keeps_its_gain(tmp_path: Path) -> None:
    import numpy as np

    from dpl.backbones import create
    from dpl.data.corruptions import corrupt

    weights = DATA / "weights" / "cifar10_resnet20.safetensors"
    file = np.load(DATA / "cifar10_test.npz")
    stream = torch.from_numpy(corrupt(file["images"][:1200], "contrast", 4)).permute(0, 3, 1, 2).float() / 255
    labels = torch.from_numpy(file["labels"][:1200].astype(np.int64))
    model = dpl.adapt(create("cifar_resnet20", weights=weights), "tent")
    for part in stream[:800].split(100):
        model(part)
    exported = create("cifar_resnet20", weights=model.export(tmp_path / "a.safetensors").path)
    alone = plain(model.model.state_dict(), create("cifar_resnet20"))
    rest, answers = stream[800:], labels[800:]
    adapted = (
        sum(share_correct(model.predict, *pair) for pair in zip(rest.split(100), answers.split(100), strict=True)) / 4
    )
    assert share_correct(exported, rest, answers) > adapted - 0.02  # three standard errors of the difference
    assert share_correct(alone, rest, answers) < adapted - 0.1
