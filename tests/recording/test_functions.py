"""Functions are found again by name, and what cannot be found says so."""

import pickle
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch.overrides import get_overridable_functions

import torchlens as tl
from torchlens._recording.functions import StandIn, argument_names, found_again, reference_to
from torchlens._recording.user_code import code_of_line, source_line, source_text

T: Any = torch.Tensor.T
DATA: Any = torch.Tensor.data


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


def at_the_top(x):
    return x


def all_functions() -> list[object]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [func for functions in get_overridable_functions().values() for func in functions]


def test_every_function_that_torch_reports_is_found_again():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # asking for some of torch's names warns that they are old
        lost = [func for func in all_functions() if found_again(reference_to(func)) != func]
    assert lost == []


@pytest.mark.parametrize(
    "func",
    [
        torch.relu, torch.Tensor.add, torch.Tensor.__iadd__, T.__get__, DATA.__set__,
        torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.ops.aten.relu.default,
        torch._C._nn.gelu,
        torch.nn.functional.linear, torch.nn.functional.scaled_dot_product_attention, Twice.apply, Twice, at_the_top,
        torch.from_numpy,
        torch.Tensor.grad.__get__,
    ],
)  # fmt: skip
def test_a_function_with_a_name_is_found_again(func):
    assert found_again(pickle.loads(pickle.dumps(reference_to(func)))) == func


def test_what_has_no_name_says_so_when_it_is_called():
    stand_in = found_again(reference_to(lambda x, weight=1: x))
    assert isinstance(stand_in, StandIn)
    assert "<lambda>" in repr(stand_in)
    assert argument_names(stand_in) == ("x", "weight")
    with pytest.raises(
        tl.TorchLensError, match=r"<lambda>.* did not come with it: it is no function at"
    ):
        stand_in(1)


@pytest.mark.slow
def test_what_is_not_known_in_another_process_may_be_known_in_a_third(tmp_path):
    reference = reference_to(at_the_top)
    code = (
        "import pickle, sys\nfrom torchlens._recording.functions import StandIn, found_again, "
        "reference_to\nstand_in = found_again(pickle.loads(open(sys.argv[1], "
        "'rb').read()))\nassert isinstance(stand_in, StandIn), stand_in\nassert "
        "'ModuleNotFoundError' in stand_in.explanation, stand_in.explanation\nopen(sys.argv[1], "
        "'wb').write(pickle.dumps(reference_to(stand_in)))\n"
    )
    path = tmp_path / "reference.pkl"
    path.write_bytes(pickle.dumps(reference._replace(module="test_functions_" + "elsewhere")))
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    back = pickle.loads(path.read_bytes())
    assert back == reference._replace(module="test_functions_elsewhere")


def test_a_line_stands_for_code():
    code = at_the_top.__code__
    last = len(code.co_code) - 2
    line, text = source_line(code, last), source_text(code, last)
    assert text == "return x"
    stand_in = code_of_line(line.file, line.line, line.function, text)
    assert source_line(stand_in, 0) == source_line(stand_in, 10**6) == line
    assert source_text(stand_in, 0) == text
