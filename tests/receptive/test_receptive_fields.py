"""Receptive and projective fields, against changing every element and against autograd."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchlens as tl
from tests.work import lines_run

torch.manual_seed(0)
IMAGE, SEQUENCE = (2, 2, 6, 6), (2, 5, 4)
GROUPED = nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2)
DILATED = nn.Conv2d(2, 3, 3, dilation=2, padding="same")
TRANSPOSED = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1)
POINTWISE, GROUP_NORM = nn.Conv2d(2, 4, 1), nn.GroupNorm(2, 4)
LSTM, ATTENTION = nn.LSTM(4, 3, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)


def write(x: Tensor) -> Tensor:
    y = torch.zeros(2, 5, 4)
    y[:, 1:3] = x[:, :2]
    y[0] = x[1]
    return y * 1


def write_through_views(x: Tensor) -> Tensor:
    y = x * 1
    y.view(2, 20)[:, 3:7].add_(x.reshape(2, 20)[:, 8:12])
    z = y * 2
    y[:, 0].copy_(x[:, 4])
    return z + y


Function = Callable[[Tensor], Tensor]
OF_IMAGES: dict[str, Function] = {
    "groups and stride": lambda x: GROUPED(x),
    "dilated": lambda x: DILATED(x),
    "transposed": lambda x: TRANSPOSED(x),
    "maximum": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 4),
    "nearest": lambda x: F.interpolate(x, size=9),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic"),
    "reflected": lambda x: F.max_pool2d(F.pad(x, (2, 1, 1, 2), mode="reflect"), 2),
    "group norm": lambda x: GROUP_NORM(POINTWISE(x)),
    "batch norm in training": lambda x: F.batch_norm(x, None, None, training=True),
    "patches": lambda x: F.fold(F.unfold(x, 3, padding=1), (6, 6), 3, padding=1),
    "pixel shuffle": lambda x: F.pixel_shuffle(POINTWISE(x), 2),
    "without a batch": lambda x: F.conv2d(x[0], torch.ones(3, 2, 3, 3)),
}
OF_SEQUENCES: dict[str, Function] = {
    "softmax": lambda x: x.softmax(1) * 2,
    "layer norm": lambda x: F.layer_norm(x, (4,)),
    "lstm": lambda x: LSTM(x)[0],
    "lstm state": lambda x: LSTM(x)[1][0],
    "attention": lambda x: ATTENTION(x, x, x)[0],
    "product": lambda x: x @ x.transpose(1, 2),
    "vector": lambda x: x @ torch.arange(1.0, 5.0),
    "einsum": lambda x: torch.einsum("btf,bsf->bts", x, x),
    "linear weight": lambda x: F.linear(torch.ones(2, 4), x[0], x[1, :, 0]),
    "addmm": lambda x: torch.addmm(x[0], x[0], x[1, :4]),
    "setitem": write,
    "views": write_through_views,
    "in place": lambda x: (x + 1).mul_(2).relu_() + 1,
    "cat": lambda x: torch.cat([x[:, :2], x * 2, x.flip(1)], 1),
    "cat with nothing": lambda x: torch.cat([torch.empty(0), x, x * 2], -2),
    "stack": lambda x: torch.stack([x, x.roll(1, 1)], 1),
    "second chunk": lambda x: x.chunk(2, -1)[1] * 1,
    "scatter": lambda x: torch.zeros(2, 3, 4).index_add(1, torch.tensor([0, 1, 1, 2, 0]), x),
    "cumsum": lambda x: x.cumsum(1),
    "halves": lambda x: F.glu(x, -1),
    "reductions": lambda x: x.var(1) + x.max(1).values + x.logsumexp(1),
    "sort": lambda x: x.sort(1).values + x.sort(dim=-1, stable=True).values,
    "windows": lambda x: x.unfold(1, 3, 1),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "no values": lambda x: torch.zeros_like(x) + torch.ones(2, 5, 4).expand_as(x) * x[:, :1],
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(2, 5, 2, 2)) * (1 + 1j)),
}  # fmt: skip
CASES = {(name, shape): function
         for shape, all_of in ((IMAGE, OF_IMAGES), (SEQUENCE, OF_SEQUENCES))
         for name, function in all_of.items()}  # fmt: skip


def by_changing_each(function: Function, x: Tensor, unit: tuple[int, ...]) -> Tensor:
    """The elements of which a change changes the unit."""
    found = torch.zeros(x.numel(), dtype=torch.bool)
    with torch.no_grad():
        before = function(x)[unit]
        for number in range(x.numel()):
            for shift in (0.3, 10.0, -10.0):
                other = x.clone()
                other.view(-1)[number] += shift
                found[number] |= bool(function(other)[unit] != before)
    return found.view(x.shape)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_the_field_is_what_changes_the_unit(name: str, shape: tuple[int, ...]) -> None:
    function = CASES[name, shape]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    history = tl.log_forward_pass(function, x)
    sizes = history["output_1"].tensor_shape
    for unit in {tuple(size - 1 for size in sizes), tuple(size // 2 for size in sizes)}:
        wanted = by_changing_each(function, x.detach(), unit)
        field = history.receptive_field("output_1", unit)
        if not field.masks:
            assert not wanted.any()
            continue
        assert torch.equal(field.mask, wanted)
        assert not field.assumed
        assert not (field.gradient[~wanted] != 0).any()
        start = tuple(wanted.nonzero()[0].tolist()) if wanted.any() else (0,) * x.dim()
        onward = history.projective_field("input_1", start)
        assert bool(onward.mask[unit]) is bool(wanted[start])
        torch.testing.assert_close(onward.gradient[unit], field.gradient[start])


class Net(nn.Module):
    """The first layers of AlexNet, a classifier, and a second output."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 11, stride=4, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(4, 4, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True),
        )  # fmt: skip
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        found = self.features(x)
        return self.head(found.mean((2, 3))), found


def test_the_table_has_the_numbers_of_alexnet() -> None:
    history = tl.log_forward_pass(Net(), torch.rand(1, 3, 224, 224).requires_grad_())
    table = history.receptive_fields()
    rows = [(table[key].size, table[key].stride, table[key].centre)
            for key in ("features.0", "features.2", "features.3", "features.5", "features.6")]  # fmt: skip
    assert rows == [
        ((11, 11), (4, 4), (3, 3)),
        ((19, 19), (8, 8), (7, 7)),
        ((51, 51), (8, 8), (7, 7)),
        ((67, 67), (16, 16), (15, 15)),
        ((99, 99), (16, 16), (15, 15)),
    ]
    assert table["head"].stride == (None, None)
    assert table["head"].size == (224, 224)
    unit = (0, 1, 6, 5)
    field = history.receptive_field("features.6", unit)
    row = table["features.6"]
    assert field.size[2:] == row.size
    assert field.centre[2:] == tuple(
        centre + stride * place
        for centre, stride, place in zip(row.centre, row.stride, unit[2:], strict=True)
    )
    assert field.mask.sum() == 3 * 99 * 99
    assert 0 < (field.gradient != 0).sum() <= 3 * 99 * 99
    text = str(table)
    assert "features.6" in text
    assert "99x99" in text
    assert "features.7" not in text  # the field of a ReLU is that of its convolution
    assert len(table.to_pandas()) == len(table) == len(history)


def test_permuted_axes_and_upsampling_keep_their_place_in_the_table() -> None:
    class Unet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(1, 2, 3, 2, 1), nn.ConvTranspose2d(2, 1, 2, 2)
            self.last = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last((self.up(self.down(x)) + x)[:, :, ::2].permute(0, 3, 2, 1))

    history = tl.log_forward_pass(Unet(), torch.rand(1, 1, 32, 24))
    row = history.receptive_fields()["last"]
    assert row.stride == (2, 1)
    for unit in [(0, 10, 8, 0), (0, 11, 8, 0)]:  # its axes are width, height
        field = history.receptive_field("last", unit)
        low = [c + s * u - (n - 1) / 2 for c, s, u, n in
               zip(row.centre, row.stride, (unit[2], unit[1]), row.size, strict=True)]  # fmt: skip
        for box, start, size in zip(field.bounds[2:], low, row.size, strict=True):
            assert start <= box.start
            assert box.stop <= start + size + 0.5


def test_the_nodes_of_a_graph_see_their_neighbourhood() -> None:
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])  # a path of five nodes

    class Graph(nn.Module):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            for _ in range(2):
                x = x + torch.zeros_like(x).index_add(0, edges[1], x.index_select(0, edges[0]))
            return x

    history = tl.log_forward_pass(Graph(), [torch.rand(5, 3), edges])
    field = history.receptive_field("output_1", (4, 1), of="input.x")
    assert field.mask.nonzero().tolist() == [[2, 1], [3, 1], [4, 1]]
    index = history.receptive_field("output_1", (4, 1), of="input.edges")
    assert index.mask[0].tolist() == [False, False, True, True]  # of the edges that reach node 4
    onward = history["input.x"].projective_field((0, 0))
    assert onward.mask.nonzero().tolist() == [[0, 0], [1, 0], [2, 0]]


def test_what_is_not_known_is_said_and_counts_as_everything() -> None:
    history = tl.log_forward_pass(lambda x: torch.cdist(x, x), torch.rand(3, 2))
    field = history.receptive_field("output_1")
    assert field.assumed == ("cdist",)
    assert field.mask.all()


def test_fields_refuse_what_they_cannot_answer() -> None:
    history = tl.log_forward_pass(Net(), torch.rand(1, 3, 64, 64))
    with pytest.raises(IndexError, match=r"No unit \(0, 9, 0, 0\) in 'conv2d_1_1', whose shape"):
        history.receptive_field("conv2d_1", (0, 9, 0, 0))
    with pytest.raises(TypeError, match="unit must be an index of 'conv2d_1_1' made of numbers"):
        history.receptive_field("conv2d_1", "all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="an input of floats that requires one"):
        _ = history.receptive_field("conv2d_2").gradient
    onward = history.projective_field("input.x")
    assert set(onward.masks) == set(history.output_layers)
    with pytest.raises(ValueError, match="There are 2 fields, in output_1"):
        _ = onward.mask
    assert onward.of("output_1_11").mask.all()


def test_the_time_grows_with_the_number_of_operations() -> None:
    def lines(count: int) -> int:
        def loop(x: Tensor) -> Tensor:
            for _ in range(count):
                x = (x + 1).softmax(-1)
            return x

        history = tl.log_forward_pass(loop, torch.rand(2, 2))
        len(history)

        def ask() -> None:
            history.receptive_field("output_1")
            history.projective_field("input_1")
            history.receptive_fields()

        return lines_run(ask)

    lines(5)
    assert lines(400) < 4.5 * lines(100)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_odd_histories_get_an_answer_or_a_sentence() -> None:
    empty = tl.log_forward_pass(lambda x: x[:0] * 2, torch.rand(3, 2))
    assert empty.receptive_fields()["output_1_3"].shape == (0, 2)
    inner = tl.log_forward_pass(Net(), torch.rand(1, 3, 64, 64)).subgraph(["conv2d_1", "relu_1"])
    with pytest.raises(ValueError, match=r"Say in which layer the fields are, .* inputs: none"):
        inner.receptive_fields()
    assert inner.receptive_fields(of="conv2d_1")["relu_1_2"].size == (1, 1)
    with pytest.raises(ValueError, match="The unit of 'relu_1_2' depends on none of these layers"):
        _ = inner.receptive_field("relu_1").gradient
    nested = tl.log_forward_pass(
        lambda x: torch.nested.nested_tensor([x, x[:2]]).to_padded_tensor(0.0), torch.rand(3, 2)
    )
    with pytest.raises(ValueError, match="Nested tensors have no receptive"):
        nested.receptive_field("output_1")
