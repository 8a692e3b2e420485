"""`load(save(h))` is `h` in every field but the live ones, which say so."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import get_overridable_functions

import torchlens as tl
from tests.networks import Model
from tests.portable.facts import differences, facts_of
from tests.portable.test_pickling import HISTORIES, saved_grad
from torchlens._portable.python_values import function_of, reference_parts
from torchlens._recording.functions import StandIn, argument_names


def odd_types(self, x):
    halves = [
        x.to(dtype)
        for dtype in (
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        )
    ]
    whole = [
        (x * 10).to(dtype)
        for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16)
    ]
    truths = x > 0.5
    return {
        "halves": [half.float() for half in halves],
        "whole": [number.float() for number in whole],
        "complex": (torch.complex(x, x).conj() * 2, torch.complex(x.double(), x.double()).conj()),
        "fnuz": x.to(torch.float8_e4m3fnuz).float(),
        "truths": truths,
        "none": None,
        "number": 3,
    }


def odd_shapes(self, x):
    empty = x[:0] * 2
    scalar = x.sum()
    columns = (x + 1)[:, ::2]
    wide = scalar.expand(50, 60)
    turned = (x * 2).t()
    windows = x.flatten().mul(3).unfold(0, 4, 1)
    last = x.reshape(1, 1, *x.shape).to(memory_format=torch.channels_last) + 1
    halves = (x * 5).chunk(2, dim=1)
    real = torch.view_as_real(torch.complex(x, x))
    negative = torch.complex(x, x).conj().imag
    nested = (x * 6).view(
        *(1,) * 20, *x.shape
    )  # the product of whose strides is larger than any memory
    return (
        nested * 1,
        empty,
        scalar,
        columns * 1,
        wide + 1,
        turned,
        windows.sum(),
        last,
        *halves,
        real,
        negative * 1,
    )


def sparse(self, x):
    csr = x.to_sparse_csr()
    jagged = torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged)
    channel = torch.quantize_per_channel(
        x, torch.ones(x.shape[0]), torch.zeros(x.shape[0]), 0, torch.quint8
    )
    return csr.to_dense() + channel.dequantize(), (jagged * 2).values(), channel


def several_passes(self, x):
    for _ in range(3):
        x = self.fc(x).relu_()
    return x, x[0]


def random_numbers(self, x):
    """Functions of torch with an argument named `from`, which is no name for an argument in
    Python.
    """
    return nn.Linear(4, 2)(x) + torch.empty(2).uniform_(0, 1) + torch.empty(2).random_(0, 5)


MORE: dict[str, Callable[[], Any]] = {
    "odd types": lambda: tl.log_forward_pass(
        Model(odd_types), torch.rand(3, 4), save_function_args=True
    ),
    "odd shapes": lambda: tl.log_forward_pass(
        Model(odd_shapes), torch.rand(3, 4), save_function_args=True
    ),
    "odd shapes, some saved": lambda: tl.log_forward_pass(
        Model(odd_shapes), torch.rand(3, 4), layers_to_save=["chunk", "unfold", "expand", "getitem"]
    ),
    "several passes, on the page": lambda: tl.log_forward_pass(
        Model(several_passes, fc=nn.Linear(4, 4)),
        torch.rand(2, 4),
        mark_input_output_distances=True,
    ),
    "sparse": lambda: tl.log_forward_pass(Model(sparse), torch.rand(3, 4)),
    "transformer, trained": lambda: saved_grad(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        torch.rand(2, 5, 8),
        save_function_args=True,
    ),
    "random numbers": lambda: tl.log_forward_pass(Model(random_numbers), torch.rand(3, 4)),
    "keywords": lambda: tl.log_forward_pass(
        nn.MultiheadAttention(8, 2),
        [torch.rand(3, 1, 8)] * 3,
        {"need_weights": False, "attn_mask": None},
    ),
}


def loaded(history: Any, folder: Path, **options: Any) -> Any:
    history.save(folder / "trace.safetensors", params=True, **options)
    return tl.load(folder / "trace.safetensors")


def facts_without_functions(history: Any) -> dict[str, Any]:
    """What is live is told by name: in the file it is nothing else."""
    facts = facts_of(history)
    for name, fact in facts.items():
        if isinstance(fact, StandIn):
            facts[name] = f"function {getattr(fact, '__name__', fact)}"
    return facts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*HISTORIES, *MORE])
def test_a_loaded_history_is_the_same_in_every_field(name: str, tmp_path: Path):
    torch.manual_seed(0)
    history = (HISTORIES | MORE)[name]()
    expected = facts_without_functions(history)
    found = facts_without_functions(loaded(history, tmp_path))
    changed = differences(found, expected)
    if name == "odd types":  # torch cannot compare all of these
        changed = {
            fact: pair
            for fact, pair in changed.items()
            if "not implemented for" not in str(pair[1])
        }
    if name == "odd shapes, some saved":  # gaps are kept only with the tensor that has them
        changed = {
            fact: (one, other)
            for fact, (one, other) in changed.items()
            if one[:5] + one[6:] != other[:5] + other[6:]  # all but the strides
        }
    if name == "subclass":  # a class that the file does not know
        plain = {
            fact: repr(pair[1]).replace("Marked(", "tensor(").replace("Marked", "Tensor")
            for fact, pair in changed.items()
        }
        changed = {fact: pair for fact, pair in changed.items() if repr(pair[0]) != plain[fact]}
    assert changed == {}


@pytest.mark.filterwarnings("ignore")  # asking for some of torch's names warns that they are old
def test_a_stand_in_of_every_function_of_torch_has_the_names_of_its_arguments():
    for func in (func for functions in get_overridable_functions().values() for func in functions):
        expected = [name for name in argument_names(func) if name.isidentifier()]
        assert list(argument_names(function_of(reference_parts(func)))) == list(
            dict.fromkeys(expected)
        ), func


@pytest.mark.parametrize("change", ["cut off", "longer", "other bytes", "emptied"])
def test_a_file_that_is_changed_underneath_is_a_clear_error(change: str, tmp_path: Path):
    history = tl.log_forward_pass(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.rand(2, 4))
    later = loaded(history, tmp_path)
    first = later["linear_1_1"].tensor_contents.clone()
    path = tmp_path / "trace.safetensors"
    content = path.read_bytes()
    new = {
        "cut off": content[:-50],
        "longer": content + b"x",
        "other bytes": bytes(len(content)),
        "emptied": b"",
    }[change]
    path.write_bytes(new)
    os.utime(
        path, ns=(0, 0)
    )  # the clock of a file system may be too coarse to tell two writes apart
    with pytest.raises(tl.TorchLensError, match=r"was changed after it was opened.* Load it again"):
        _ = later["relu_1_2"].tensor_contents
    assert later.layer_labels == history.layer_labels
    assert torch.equal(first, history["linear_1_1"].tensor_contents)


def test_a_file_that_is_replaced_or_deleted_stays_readable(tmp_path: Path):
    history = tl.log_forward_pass(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.rand(2, 4))
    replaced = loaded(history, tmp_path)
    loaded(tl.log_forward_pass(nn.Linear(4, 4), torch.rand(2, 4)), tmp_path)
    assert torch.equal(replaced["relu_1_2"].tensor_contents, history["relu_1_2"].tensor_contents)
    (tmp_path / "trace.safetensors").unlink()
    assert torch.equal(
        replaced["linear_1_1"].tensor_contents, history["linear_1_1"].tensor_contents
    )


class RunsInMkldnn(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to_mkldnn().relu().to_dense()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no mkldnn")
def test_tensors_of_mkldnn_come_back_dense(tmp_path: Path):
    history = tl.log_forward_pass(RunsInMkldnn(), torch.randn(2, 3))
    history.save(tmp_path / "trace.safetensors")
    value = tl.load(tmp_path / "trace.safetensors")["relu_1"].tensor_contents
    assert torch.equal(value, history["relu_1"].tensor_contents.to_dense())


def test_a_parameter_that_was_saved_can_still_be_resized(tmp_path):
    """What `Tensor.numpy` was called on never can again, and FSDP gives the memory of parameters
    back that way.
    """
    model = nn.Linear(4, 4)
    tl.log_forward_pass(model, torch.rand(2, 4)).save(tmp_path / "log.safetensors", params=True)
    model.weight.untyped_storage().resize_(0)
    assert model.weight.untyped_storage().nbytes() == 0


def test_parameters_and_gradients_are_read_as_they_were_also_if_they_share_memory(tmp_path: Path):
    model = Model(lambda self, x: self.table.sum() + self.part.sum() + (self.wave * x).abs().sum())
    model.table = nn.Parameter(torch.arange(15.0).view(5, 3))
    model.part = nn.Parameter(model.table.data[1:3].t())
    model.wave = nn.Parameter(torch.tensor([1 + 2j, 3j], dtype=torch.complex128))
    history = saved_grad(model, torch.rand(2))
    loaded(history, tmp_path)
    values = tl.read_trace(tmp_path / "trace.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(values[f"params/{name}"], parameter.detach()), name
        assert parameter.grad is not None
        assert torch.equal(values[f"params/{name}/grad"], parameter.grad), name
        assert not values[f"params/{name}"].requires_grad
    assert values["1/mul/grad"].dtype is torch.complex128


@pytest.mark.filterwarnings("ignore")  # torch is going to drop these types
@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8, torch.quint4x2])
def test_a_quantized_output_with_zero_points_that_are_no_whole_numbers_is_logged_and_loads(
    dtype: Any, tmp_path: Path
):
    model = Model(
        lambda self, x: torch.quantize_per_channel(
            x, torch.full((4,), 0.5), torch.full((4,), 0.5), 0, dtype
        )
    )
    x = torch.arange(16.0).view(4, 4) / 4
    result = tl.log_forward_pass(model, x)["output_1"].tensor_contents
    assert torch.equal(result.dequantize(), model(x).dequantize())
    found = loaded(tl.log_forward_pass(model, x), tmp_path)["output_1"].tensor_contents
    if dtype is torch.quint4x2:
        assert isinstance(found, StandIn)
        assert "several numbers in a byte" in found.explanation
    else:
        assert torch.equal(found.dequantize(), result.dequantize())


def test_empty_tensors_come_back_with_their_strides(tmp_path: Path):
    def empties(self, x):
        first = (x + 1)[:, :0]
        wide = (x + 2)[:0].expand(5, 0, 4)
        return (
            first,
            wide,
            (x + 3)[:0, ::2].t(),
            torch.empty(3, 0).expand(2, 3, 0),
            torch.empty_strided((0, 3), (0, 0)),
        )

    history = tl.log_forward_pass(Model(empties), torch.rand(3, 4))
    for entry, other in zip(history, loaded(history, tmp_path), strict=True):
        one, two = entry.tensor_contents, other.tensor_contents
        assert (one.shape, one.stride()) == (two.shape, two.stride()), entry.layer_label


def test_without_safetensors_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "trace.safetensors"
    history = tl.log_forward_pass(nn.Linear(2, 2), torch.rand(1, 2))
    history.save(path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for use in (
        lambda: history.save(path),
        lambda: tl.load(path),
        lambda: tl.read_trace(path),
        lambda: tl.tail(nn.Linear(2, 2), path).__enter__(),
    ):
        with pytest.raises(ImportError, match=r"pip install 'torchlens\[trace\]'"):
            use()
    assert list(tmp_path.iterdir()) == [path]
