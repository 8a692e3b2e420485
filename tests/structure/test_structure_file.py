"""assert_same_structure and `torchlens check`: a model does what a file says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from benchmarks.zoo.libraries import import_timm, import_torchvision, import_transformers
from tests.history.test_structure_hash import CHANGES, SAME, X, base
from tests.networks import MLP, Model
from torchlens._cli.main import main


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.lens.json"
    tl.assert_same_structure(base(), file, X, update=True)
    return file


def message(model: Any, path: Path, *inputs: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        tl.assert_same_structure(model, path, *inputs)
    return str(caught.value)


@pytest.mark.parametrize("name", SAME)
def test_a_model_that_does_the_same_passes_without_inputs(name: str, path: Path) -> None:
    tl.assert_same_structure(SAME[name](), path)


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_does_something_else_fails_with_a_difference_in_words(
    name: str, path: Path
) -> None:
    inputs = [X.double()] if name == "dtype" else []
    lines = message(CHANGES[name](), path, *inputs).splitlines()
    assert "has another structure than model.lens.json says" in lines[0]
    assert 1 <= len(lines[1:-1]) <= 22
    assert "TORCHLENS_UPDATE=1" in lines[-1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kernel", "argument: kernel 3×3, padding 1 → kernel 5×5, padding 2"),
        ("dropout rate", "drop (dropout_1_8): argument: p 0.1 → p 0.2"),
        ("epsilon", "norm (batchnorm_1_2): argument: eps 1e-05 → eps 0.001"),
        ("norm left out", "operation: BatchNorm2d → Identity"),
        ("activation", "relu_1_3 → gelu_1_3: operation: relu → gelu"),
        ("residual", "add_1_4: added"),
        ("bias", "left (conv2d_2_4): parameters: 4×4×1×1, 4 → 4×4×1×1"),
        ("tied weights", "+ 8 conv2d(0:#6, 1:left.weight, 2:right.bias)"),
        ("operands", "+ 9 sub(0:#8, 1:#7)"),
        ("source of the residual", "- 12 add(0:#11, 1:#0)"),
        ("unused parameter", "+ parameter unused.weight 2×2 float32"),
        ("names of outputs", "- 16 output.logits #14"),
    ],
)
def test_the_words_say_what_changed(name: str, words: str, path: Path) -> None:
    assert words in message(CHANGES[name](), path)


def test_the_file_is_written_only_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "folder" / "a.lens.json"
    with pytest.raises(FileNotFoundError, match="TORCHLENS_UPDATE=1"):
        tl.assert_same_structure(MLP(), file, torch.rand(2, 4))
    assert not file.exists()
    monkeypatch.setenv("TORCHLENS_UPDATE", "1")
    tl.assert_same_structure(MLP(), file, input_size=(2, 4))
    tl.assert_same_structure(nn.Sequential(nn.Linear(4, 2)), file, input_size=(2, 4))
    monkeypatch.delenv("TORCHLENS_UPDATE")
    tl.assert_same_structure(nn.Sequential(nn.Linear(4, 2)), file)


def test_the_file_is_the_same_each_time_and_has_lines_to_read(path: Path) -> None:
    first = path.read_text(encoding="utf-8")
    tl.assert_same_structure(base(), path, X + 1, update=True)
    assert path.read_text(encoding="utf-8") == first
    assert '  "14 linear(0:#13, 1:head.weight, 2:head.bias) 2×5 float32 head:1"' in first
    assert str(Path(__file__).parent) not in first
    assert str(Path.home()) not in first


def test_a_history_and_a_trace_can_be_checked(path: Path, tmp_path: Path) -> None:
    history = tl.log_forward_pass(base(), X)
    tl.assert_same_structure(history, path)
    history.save(tmp_path / "trace.safetensors")
    assert main(["check", str(tmp_path / "trace.safetensors"), str(path)]) == 0


def test_inputs_that_cannot_be_made_anew_must_be_given(tmp_path: Path) -> None:
    model, x = Model(lambda self, pair: pair[0] + pair[1]), [(torch.rand(2), torch.rand(2))]
    tl.assert_same_structure(model, tmp_path / "a.json", x, update=True)
    tl.assert_same_structure(model, tmp_path / "a.json", x)
    with pytest.raises(ValueError, match="not plain arguments"):
        tl.assert_same_structure(model, tmp_path / "a.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "it is not JSON"),
        ("[]", "no file of a structure"),
        ('{"format": "torchlens-structure", "version": 9}', "another version of torchlens"),
        ('{"format": "torchlens-structure", "version": 1}', "is damaged"),
    ],
)
def test_other_files_are_refused_in_words(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(tl.TraceError, match=words):
        tl.assert_same_structure(base(), tmp_path / "a.json")


def test_a_file_of_a_stranger_is_read_safely(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    document["graph"]["rows"]["module_call"][0] = 10**6
    path.write_text(json.dumps(document))
    with pytest.raises(tl.TraceError, match="is damaged"):
        tl.assert_same_structure(base(), path)


PROGRAM = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, {width}), nn.Dropout(0.5), nn.ReLU())

def with_inputs():
    return model(), torch.rand(3, 4)
"""


def test_the_command_checks_and_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(PROGRAM.format(width=5))
    (tmp_path / "other.py").write_text(PROGRAM.format(width=6))
    assert main(["check", "net.py:with_inputs", "a.json"]) == 2
    assert main(["check", "net.py:with_inputs", "a.json", "--update"]) == 0
    assert main(["check", "net.py:model", "a.json"]) == 0
    capsys.readouterr()
    assert main(["check", "other.py:model", "a.json"]) == 1
    assert (
        "0 (linear_1_1): shape: 3×5 → 3×6; parameters: 5×4, 5 → 6×4, 6" in capsys.readouterr().out
    )
    assert main(["check", "net.py:model", "a.json", "--train"]) == 1


def _torchvision(name: str) -> Any:
    return import_torchvision().models.get_model(name, weights=None).eval()


def _timm(name: str) -> Any:
    return import_timm().create_model(name, pretrained=False).eval()


def _transformers(name: str, **sizes: int) -> Any:
    transformers = import_transformers()
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}Model")(config).eval()


SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 9,
}
IMAGE = {"input_size": (1, 3, 64, 64)}
TOKENS = {"input_size": {"input_ids": (1, 5)}, "dtypes": torch.long}
REAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "resnet18": (lambda: _torchvision("resnet18"), IMAGE),
    "squeezenet": (lambda: _torchvision("squeezenet1_1"), IMAGE),
    "mobilenet": (lambda: _torchvision("mobilenet_v3_small"), IMAGE),
    "shufflenet": (lambda: _torchvision("shufflenet_v2_x0_5"), IMAGE),
    "timm resnet": (lambda: _timm("test_resnet"), IMAGE),
    "timm vit": (lambda: _timm("test_vit"), {"input_size": (1, 3, 160, 160)}),
    "timm convnext": (lambda: _timm("test_convnext"), IMAGE),
    "bert": (lambda: _transformers("Bert", **SMALL), TOKENS),
    "llama": (lambda: _transformers("Llama", **SMALL), TOKENS),
    "gpt2": (lambda: _transformers("GPT2", n_layer=2, n_head=2, n_embd=8, vocab_size=9), TOKENS),
    "geometric": (
        lambda: pytest.importorskip("torch_geometric").nn.GCN(4, 8, 2).eval(),
        {"input_size": {"x": (6, 4), "edge_index": (2, 9)}, "dtypes": {"edge_index": torch.long}},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_models_have_the_structure_of_their_file_and_a_changed_one_has_not(
    name: str, tmp_path: Path
) -> None:
    make, options = REAL[name]
    file = tmp_path / "real.json"
    tl.assert_same_structure(make(), file, update=True, **options)
    torch.manual_seed(3)
    tl.assert_same_structure(make(), file)  # other weights, inputs made from the file
    changed = make()
    for module in changed.modules():
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm) or hasattr(module, "variance_epsilon"):
            attribute = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"
            setattr(module, attribute, 0.125)
            break
    else:
        next(m for m in changed.modules() if hasattr(m, "bias") and m.bias is not None).bias = None
    assert "real.json says" in message(changed, file)
