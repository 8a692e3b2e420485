import base64

import pytest
import torch

from torchlens._page.value_columns import Statistics


def _columns(*tensors):
    statistics = Statistics()
    rows = [statistics.add(tensor) for tensor in tensors]
    return rows, statistics.columns()


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 8, 8), (100, 100), (2, 1024, 1024)])
def test_moments_are_those_of_the_tensor(shape):
    tensor = torch.randn(shape).relu()
    _, columns = _columns(tensor, tensor + 1)
    assert columns["min"][0] == pytest.approx(float(tensor.min()), rel=1e-3)
    assert columns["max"][0] == pytest.approx(float(tensor.max()), rel=1e-3)
    tolerance = 0.05 if tensor.numel() > 1 << 20 else 1e-3
    assert columns["mean"][0] == pytest.approx(float(tensor.mean()), rel=tolerance)
    assert columns["std"][0] == pytest.approx(float(tensor.std(correction=0)), rel=tolerance)
    assert columns["zeros"][0] == pytest.approx(float((tensor == 0).float().mean()), abs=tolerance)
    assert columns["mean"][1] == pytest.approx(columns["mean"][0] + 1, rel=tolerance)
    assert (columns["sample"][0] > 0) == (tensor.numel() > 1 << 20)


def test_non_finite_values_are_counted_and_left_out_of_the_rest():
    _, columns = _columns(
        torch.tensor([1.0, 3.0, torch.nan, torch.inf]), torch.full((3,), torch.nan)
    )
    assert columns["nonfinite"] == [0.5, 1.0]
    assert columns["min"] == [1.0, None]
    assert columns["max"] == [3.0, None]
    assert columns["mean"] == [2.0, None]
    assert columns["std"] == [1.0, None]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
    ],
)
def test_every_type_of_number_is_described(dtype):
    _, columns = _columns(torch.tensor([[0, 1], [1, 1]]).to(dtype))
    assert columns["mean"] == [0.75]
    assert columns["zeros"] == [0.25]


def test_what_has_no_numbers_has_no_row():
    rows, columns = _columns(
        None, "text", torch.empty(0), torch.empty(2, device="meta"), torch.ones(2, 2).to_sparse()
    )
    assert rows == [-1] * 5
    assert columns["min"] == []


def test_histogram_and_picture():
    _, columns = _columns(torch.tensor([[0.0, 0.0, 0.0, 4.0]]))
    histogram = list(base64.b64decode(columns["histograms"]))
    assert len(histogram) == columns["bins"]
    assert histogram[0] == 255
    assert histogram[-1] == 85
    assert sum(histogram[1:-1]) == 0
    assert (columns["rows"], columns["cols"]) == ([1], [4])
    assert list(base64.b64decode(columns["heat"])) == [0, 0, 0, 254]
