"""Models with NaN or Inf planted in them: where each comes from is known, as it was put there."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["PLANTED", "Planted", "Step"]

Tensor = torch.Tensor
INF, NAN = math.inf, math.nan
Step = Callable[[nn.Module, int], None]


@dataclass
class Planted:
    """A model, what goes in, and the place to blame: (phase, layer type, module). None: nothing is
    wrong.
    """

    model: Callable[[], nn.Module]
    blamed: tuple[str, str, str] | None
    inputs: Callable[[], tuple[Any, ...]] = lambda: (batch(),)
    loss: Callable[[Tensor], Tensor] = lambda y: y.float().sum()
    severity: str = "error"
    num_findings: int = 1  # operations that make it independently of each other
    # Where it is, as far as modules tell: the same module by default; another phase where less is
    # seen.
    by_module: tuple[str, str] | None = None
    is_from_outside: bool = False
    has_backward: bool = True
    autocast: torch.dtype | None = None
    only: tuple[str, ...] = field(default=("history", "operation", "module"))


def batch(value: float | None = None, rows: int = 8, columns: int = 4) -> Tensor:
    x = torch.linspace(-2, 2, rows * columns).view(rows, columns)
    if value is not None:
        x[0, 0] = value
    return x


def bad_batch(value: float) -> tuple[Tensor]:
    return (batch(value),)


class Net(nn.Module):
    """Two layers with `middle` between them, called with what the first returns."""

    def __init__(self, middle: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = Middle(middle)
        self.last = nn.Linear(4, 4)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class Middle(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, y: Tensor) -> Tensor:
        return self.function(y)


class Free(nn.Module):
    """Any function of the model and its arguments."""

    def __init__(self, function: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any) -> Tensor:
        return self.function(self, *args)


def middle(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Net(function)


def stack(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(layer() for layer in layers))


def broken(model: nn.Module, address: str, value: float) -> nn.Module:
    with torch.no_grad():
        model.get_parameter(address).view(-1)[0] = value
    return model


def lin() -> nn.Module:
    return nn.Linear(4, 4)


def with_hook(
    model: nn.Module, address: str, hook: Any, kind: str = "register_forward_hook"
) -> nn.Module:
    getattr(model.get_submodule(address), kind)(hook)
    return model


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / (gradient * 0)


class _Steep(torch.autograd.Function):
    """Nothing but zeros, as if they had a steep slope."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1e30


class BadForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.log(-x.abs() - 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def _write_nan(y: Tensor) -> Tensor:
    y = y * 1
    y[0, 0] = NAN
    return y.relu()


def _fill_view(y: Tensor) -> Tensor:
    y = y * 1
    y.view(-1)[3:5].div_(0.0)
    return y * 2


def _reuse(y: Tensor) -> Tensor:
    masked = y.masked_fill(y > -100, -INF)
    kept = masked.exp()
    del masked
    for _ in range(20):
        y = y + 1
    y = torch.log(y * 0 - 1)
    return kept + y


def _attention(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    y = model.proj(x)
    return model.out(F.scaled_dot_product_attention(y, y, y, attn_mask=mask))


def _softmax_attention(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    y = model.proj(x)
    return model.out(torch.softmax(y @ y.mT + mask, -1) @ y)


def _parts() -> dict[str, nn.Module]:
    return {"proj": lin(), "out": lin()}


def _mask(rows: int = 8, whole_row: bool = False) -> Tensor:
    mask = torch.triu(torch.full((rows, rows), -INF), 1)
    if whole_row:
        mask[3] = -INF
    return mask


def _rnn(model: Any, x: Tensor) -> Tensor:
    state = torch.zeros(8, 4)
    for _ in range(60):
        state = model.cell(x + state * 8)
    return state


def _checkpointed(
    use_reentrant: bool, inner: Callable[[Tensor], Tensor]
) -> Callable[[], nn.Module]:
    def forward(model: Any, x: Tensor) -> Tensor:
        y = model.first(x)
        y = checkpoint(model.block, y, use_reentrant=use_reentrant)
        return model.last(y)

    return lambda: Free(forward, first=lin(), block=Middle(inner), last=lin())


def _vmapped(model: Any, x: Tensor) -> Tensor:
    return model.last(torch.func.vmap(lambda row: torch.log(-row.abs() - 1))(model.first(x)))


def _embedded(bad: int) -> nn.Module:
    model = nn.Sequential(nn.Embedding(10, 4), lin())
    with torch.no_grad():
        model[0].weight[bad] = NAN
    return model


def _exploding(depth: int = 30, scale: float = 1e3) -> nn.Module:
    model = nn.Sequential(*(lin() for _ in range(depth)))
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(torch.eye(4) * scale)
            layer.bias.zero_()
    return model


def _running(value: float) -> nn.Module:
    model = nn.Sequential(lin(), nn.BatchNorm1d(4), lin()).eval()
    model[1].running_mean[0] = value
    return model


def _shared(model: Any, x: Tensor) -> Tensor:
    y = model.layer(x)
    y = torch.log(y * 0 - 1)
    return model.layer(y)


def _transposed(model: Any, x: Tensor) -> Tensor:
    return x @ model.a.weight.t() @ model.b.weight.t()


_ELSEWHERE = torch.full((2, 2), NAN)
_MASK_ELSEWHERE = _mask()
MID = ("forward", "middle")


PLANTED: dict[str, Planted] = {
    # -- values that an operation makes
    "0/0": Planted(middle(lambda y: (y * 0) / (y * 0)), ("forward", "truediv", "middle")),
    "log of 0": Planted(middle(lambda y: torch.log(y * 0)), ("forward", "log", "middle")),
    "log of less than 0": Planted(middle(lambda y: torch.log(-y.abs() - 1)), ("forward", "log", "middle")),
    "sqrt of less than 0": Planted(middle(lambda y: torch.sqrt(-y.abs() - 1)), ("forward", "sqrt", "middle")),
    "acos beyond 1": Planted(middle(lambda y: torch.acos(y.abs() + 2)), ("forward", "acos", "middle")),
    "0 to a power below 0": Planted(middle(lambda y: (y * 0) ** -1.0), ("forward", "pow", "middle")),
    "exp overflows": Planted(middle(lambda y: torch.exp(y.abs() + 1000)), ("forward", "exp", "middle")),
    "product overflows": Planted(middle(lambda y: (y.abs() + 1) * 1e30 * 1e30), ("forward", "mul", "middle")),
    "Inf - Inf": Planted(
        middle(lambda y: torch.exp(y.abs() + 1000) - torch.exp(y.abs() + 1000)), ("forward", "exp", "middle"),
        num_findings=2,
    ),
    "0 * Inf of a log": Planted(middle(lambda y: torch.relu(y * 0) * torch.log(y * 0)), ("forward", "log", "middle")),
    "std of one element": Planted(
        lambda: Free(lambda m, x: m.a(x[:1]) / m.a(x[:1]).std(0), a=lin()), ("forward", "std", "")
    ),
    "variance of one element": Planted(middle(lambda y: y / y[:1].var(0)), ("forward", "var", "middle")),
    "mean of nothing": Planted(middle(lambda y: y + y[:0].mean(0)), ("forward", "mean", "middle")),
    "normalized by hand at 0": Planted(
        middle(lambda y: (y * 0) / (y * 0).norm(dim=-1, keepdim=True)), ("forward", "truediv", "middle")
    ),
    "half overflows": Planted(middle(lambda y: ((y.half().abs() + 300) ** 2).float()), ("forward", "pow", "middle")),
    "to half": Planted(middle(lambda y: (y.abs() * 1e6 + 1e6).half().float()), ("forward", "half", "middle")),
    "bfloat16 overflows": Planted(
        middle(lambda y: ((y.abs() + 1).bfloat16() * 3e38 * 3e38).float()), ("forward", "mul", "middle")
    ),
    "softmax of a row of -Inf": Planted(
        middle(lambda y: torch.softmax(y.masked_fill(torch.arange(8)[:, None] == 3, -INF), -1)),
        ("forward", "softmax", "middle"),
    ),
    "softmax by hand overflows": Planted(
        middle(lambda y: torch.exp(y + 1000) / torch.exp(y + 1000).sum(-1, keepdim=True)), ("forward", "exp", "middle"),
        num_findings=2,
    ),
    "log-sum-exp by hand of a masked row": Planted(
        middle(lambda y: y - torch.log(torch.exp(y.masked_fill(y > -100, -INF)).sum(-1, keepdim=True))),
        ("forward", "log", "middle"),
    ),
    "attention with a row masked altogether": Planted(
        lambda: Free(_softmax_attention, **_parts()), ("forward", "softmax", ""), lambda: (batch(), _mask(whole_row=True))
    ),
    "BatchNorm of large numbers": Planted(
        lambda: Free(lambda m, x: m.norm(m.a(x) * 1e30), a=lin(), norm=nn.BatchNorm1d(4)), None
    ),
    "LayerNorm by hand of equal numbers": Planted(
        middle(lambda y: (y * 0 - (y * 0).mean(-1, keepdim=True)) / (y * 0).var(-1, keepdim=True).sqrt()),
        ("forward", "truediv", "middle"),
    ),
    "overflow to minus infinity in a layer without a bias": Planted(
        lambda: Free(lambda m, x: m.a(x.abs() + 1), a=_big(nn.Linear(4, 4, bias=False), -3e38)),
        ("forward", "linear", "a"), only=("history", "operation"),
    ),
    "a layer that grows without end": Planted(lambda: Free(_rnn, cell=_big(lin())), ("forward", "linear", "cell")),
    "layer after layer": Planted(lambda: _exploding(), ("forward", "linear", "12")),
    "written in place": Planted(middle(_write_nan), ("forward", "setitem", "middle")),
    "written through a view": Planted(middle(_fill_view), ("forward", "div", "middle")),
    "memory used again": Planted(middle(_reuse), ("forward", "log", "middle")),
    "custom function, forward": Planted(middle(BadForward.apply), ("forward", "log", "middle")),
    "a layer called twice": Planted(lambda: Free(_shared, layer=lin()), ("forward", "log", "")),
    # one operation
    "vmap": Planted(lambda: Free(_vmapped, first=lin(), last=lin()), ("forward", "", "")),
    "checkpoint, reentrant": Planted(
        _checkpointed(True, lambda y: torch.log(y * 0 - 1)), ("forward", "log", "block")
    ),
    "checkpoint, not reentrant": Planted(
        _checkpointed(False, lambda y: torch.log(y * 0 - 1)), ("forward", "log", "block")
    ),
    "division by a count of 0": Planted(
        middle(lambda y: y.sum(0, keepdim=True) / (y > 100).sum(0, keepdim=True)), ("forward", "truediv", "middle")
    ),
    "cosine by hand": Planted(
        middle(lambda y: F.relu(-y.abs()) / F.relu(-y.abs()).pow(2).sum(-1, keepdim=True).sqrt()),
        ("forward", "truediv", "middle"),
    ),
    "complex": Planted(middle(lambda y: torch.view_as_real(torch.log(torch.complex(y * 0, y * 0)))[..., 0]),
                       ("forward", "log", "middle")),
    "a power series": Planted(middle(lambda y: torch.cumprod(y.abs() * 1e30 + 1e30, -1)), ("forward", "cumprod", "middle")),
    "several results of one operation": Planted(
        middle(lambda y: y + (y / 0).max(-1, keepdim=True).values),
        ("forward", "truediv", "middle"),
    ),
    "several results that are not finite": Planted(
        middle(lambda y: torch.cat(torch.aminmax(y.log(), dim=-1, keepdim=True)).sum() + y), ("forward", "log", "middle")
    ),
    "variance and mean of one element": Planted(
        middle(lambda y: y + torch.stack(torch.var_mean(y[:1], 0)).sum(0)), ("forward", "varmean", "middle")
    ),
    # -- values that were there before
    "NaN in the batch": Planted(stack(lin, nn.ReLU, lin), ("forward", "input", ""), lambda: (batch(NAN),)),
    "Inf in the batch": Planted(stack(lin, nn.ReLU, lin), ("forward", "input", ""), lambda: (batch(INF),)),
    "-Inf in the batch": Planted(stack(lin, nn.ReLU, lin), ("forward", "input", ""), lambda: (batch(-INF),)),
    **{
        f"{value} in the batch, contained by {kind.__name__}": Planted(
            stack(lin, kind, lin), ("forward", "input", ""), partial(bad_batch, value)
        )
        for kind in (nn.Tanh, nn.Sigmoid, nn.Hardtanh)
        for value in (INF, -INF)
    },
    "Inf in the batch, contained by a clamp": Planted(
        lambda: Free(lambda m, x: m.last(torch.clamp(m.first(x), -1, 1)), first=lin(), last=lin()),
        ("forward", "input", ""), lambda: (batch(INF),),
    ),
    "Inf in the batch, scaled by a parameter": Planted(
        lambda: Free(lambda m, x: torch.tanh(m.w * x), w=nn.Parameter(torch.ones(4))),
        ("forward", "input", ""), lambda: (batch(INF),),
    ),
    "-Inf in the batch, clamped before use": Planted(
        lambda: Free(lambda m, x: m.a(x.clamp(-3, 3)), a=lin()), None, lambda: (batch(-INF),)
    ),
    "NaN in the second input": Planted(
        lambda: Free(lambda m, x, z: m.a(x) + z, a=lin()), ("forward", "input", ""), lambda: (batch(), batch(NAN))
    ),
    "NaN in a weight": Planted(lambda: broken(stack(lin, nn.ReLU, lin)(), "0.weight", NAN), ("forward", "linear", "0")),
    "Inf in a weight": Planted(lambda: broken(stack(lin, nn.ReLU, lin)(), "0.weight", INF), ("forward", "linear", "0")),
    "NaN in the last bias": Planted(lambda: broken(stack(lin, nn.ReLU, lin)(), "2.bias", NAN), ("forward", "linear", "2")),
    "NaN read as a number": Planted(
        lambda: Net(lambda y: y * (y.sum() * 0 / (y.sum() * 0)).item()), ("forward", "truediv", "middle")
    ),
    "Inf read as a number": Planted(
        lambda: Net(lambda y: y * (1 / (y.sum() * 0).abs()).item()), ("forward", "rtruediv", "middle")
    ),
    "NaN that Python makes of Inf that was read": Planted(
        lambda: Net(lambda y: y * ((1 / (y.sum() * 0).abs()).item() * 0)), ("forward", "rtruediv", "middle")
    ),
    "a NaN constant beside Inf that is discarded": Planted(
        lambda: Net(lambda y: torch.where(y == y, y, y / 0) * NAN), ("forward", "mul", "middle"), only=("history",)
    ),
    "a mask beside minus infinity that is not read": Planted(
        lambda: Net(lambda y: (y.masked_fill(y > 1, -INF).softmax(-1), (y.sum() * 0).abs().log())[0]),
        ("forward", "log", "middle"),
        severity="info",
        has_backward=False,
        only=("history", "operation"),
    ),
    "NaN in every weight": Planted(
        lambda: broken(broken(broken(stack(lin, nn.ReLU, lin)(), "2.bias", NAN), "0.weight", NAN), "2.weight", INF),
        ("forward", "linear", "0"),
    ),
    "NaN in a norm's weight": Planted(
        lambda: broken(stack(lin, lambda: nn.LayerNorm(4), lin)(), "1.weight", NAN), ("forward", "layernorm", "1")
    ),
    "NaN in a row of an embedding that is read": Planted(
        lambda: _embedded(3), ("forward", "embedding", "0"), lambda: (torch.tensor([[1, 3, 5]]),)
    ),
    "NaN in a row of an embedding that is not read": Planted(lambda: _embedded(3), None, lambda: (torch.tensor([[1, 5]]),)),
    "NaN in the attention's output weights": Planted(
        lambda: broken(
            Free(lambda m, x: m.mha(x, x, x, need_weights=False)[0], mha=nn.MultiheadAttention(4, 2, batch_first=True)),
            "mha.out_proj.weight", NAN,
        ),
        ("forward", "linear", "mha"), lambda: (batch()[None],),
    ),
    "NaN in an LSTM's weight": Planted(
        lambda: broken(Free(lambda m, x: m.lstm(x)[0], lstm=nn.LSTM(4, 4, batch_first=True)), "lstm.weight_ih_l0", NAN),
        ("forward", "lstm", "lstm"), lambda: (batch()[None],),
    ),
    "NaN in a weight that the model uses itself": Planted(
        lambda: broken(Free(lambda m, x: F.linear(x, m.a.weight), a=lin()), "a.weight", NAN), ("forward", "linear", "")
    ),
    "NaN in every weight, each read through a view": Planted(
        lambda: broken(broken(Free(_transposed, a=lin(), b=lin()), "a.weight", NAN), "b.weight", NAN), ("forward", "t", "")
    ),
    "-Inf in a weight that is read through a view": Planted(
        lambda: broken(Free(_transposed, a=lin(), b=lin()), "a.weight", -INF), ("forward", "t", "")
    ),
    "NaN in a tensor from elsewhere that is read through a view": Planted(
        lambda: Free(lambda m, x: m.a(x) + _ELSEWHERE.view(4), a=lin()), ("forward", "view", "")
    ),
    "NaN in a running mean": Planted(lambda: _running(NAN), ("forward", "buffer", ""), by_module=("forward", "1")),
    "NaN in a buffer": Planted(
        lambda: Free(lambda m, x: m.a(x) + m.shift, a=lin(), shift=torch.tensor(NAN)), ("forward", "buffer", "")
    ),
    "a constant": Planted(middle(lambda y: y * NAN), ("forward", "mul", "middle")),
    "a constant tensor": Planted(middle(lambda y: y + torch.tensor(NAN)), ("forward", "tensor", "middle")),
    "a hook that breaks a value": Planted(
        lambda: with_hook(stack(lin, nn.ReLU, lin)(), "1", lambda module, args, output: output * NAN),
        ("forward", "mul", "1"),
    ),
    "a hook before a module": Planted(
        lambda: with_hook(
            stack(lin, nn.ReLU, lin)(), "2", lambda module, args: (args[0] / 0,), "register_forward_pre_hook"
        ),
        ("forward", "truediv", "2"),
    ),
    # -- infinity that is meant
    "masked_fill, softmax": Planted(
        middle(lambda y: torch.softmax(y.masked_fill(torch.eye(8, 4).bool(), -INF), -1)), None
    ),
    "a causal mask": Planted(
        lambda: Free(lambda m, x: _softmax_attention(m, x, _mask()), **_parts()), None
    ),
    "a mask that goes in": Planted(lambda: Free(_softmax_attention, **_parts()), None, lambda: (batch(), _mask())),
    "a mask for sdpa": Planted(lambda: Free(_attention, **_parts()), None, lambda: (batch(), _mask())),
    "a mask in a buffer": Planted(
        lambda: Free(lambda m, x: _softmax_attention(m, x, m.mask), mask=_mask(), **_parts()), None
    ),
    "a mask from elsewhere": Planted(
        lambda: Free(lambda m, x: _softmax_attention(m, x, _MASK_ELSEWHERE), **_parts()), None
    ),
    "a mask for nn.MultiheadAttention": Planted(
        lambda: Free(lambda m, x: m.mha(x, x, x, attn_mask=_mask())[0], mha=nn.MultiheadAttention(4, 2, batch_first=True)),
        None, lambda: (batch()[None],),
    ),
    "a transformer layer with a mask": Planted(
        lambda: Free(
            lambda m, x: m.layer(x, src_mask=_mask()), layer=nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        ),
        None, lambda: (batch()[None],),
    ),
    "the best of all": Planted(middle(lambda y: torch.maximum(y, torch.full((4,), -INF))), None),
    "a running best that begins at -Inf": Planted(
        middle(lambda y: torch.stack([y, torch.full_like(y, -INF)]).max(0).values), None
    ),
    "top-k filter": Planted(
        middle(lambda y: torch.softmax(y.masked_fill(y < y.topk(2).values[..., -1:], -INF), -1)), None
    ),
    "log-softmax of what is masked, selected": Planted(
        middle(lambda y: torch.log_softmax(y.masked_fill(torch.eye(8, 4).bool(), -INF), -1)[4:]), None
    ),
    "nan_to_num": Planted(
        middle(lambda y: torch.nan_to_num(y / (y * 0 + torch.eye(8, 4)), 0.0, 0.0, 0.0).detach() + y),
        ("forward", "truediv", "middle"), severity="info", only=("history", "operation"),
    ),
    "empty, then filled": Planted(middle(lambda y: torch.empty_like(y).fill_(1.0) + y), None),
    # -- gradients
    "sqrt at 0": Planted(middle(lambda y: torch.sqrt((y * 0).square())), ("backward", "sqrt", "middle")),
    "norm by hand at 0": Planted(
        middle(lambda y: y + (y * 0).square().sum(-1, keepdim=True).sqrt()), ("backward", "sqrt", "middle")
    ),
    "a power at 0": Planted(middle(lambda y: (y * 0) ** 0.5), ("backward", "pow", "middle")),
    "hypot at 0": Planted(middle(lambda y: torch.hypot(y * 0, y * 0)), ("backward", "hypot",
    "middle")),
    "acos at 1": Planted(middle(lambda y: torch.acos(y * 0 + 1)), ("backward", "acos", "middle")),
    "variance of equal numbers, its root": Planted(
        middle(lambda y: y + (y * 0).var(-1, keepdim=True).sqrt()), ("backward", "sqrt", "middle")
    ),
    "distance from itself": Planted(
        middle(lambda y: y + (y * 0).square().sum(-1).sqrt().mean()), ("backward", "sqrt", "middle")
    ),
    "where, the branch not taken": Planted(
        middle(lambda y: torch.where(y > 100, torch.sqrt(y * 0), y)), ("backward", "sqrt", "middle")
    ),
    "custom function, backward": Planted(middle(BadBackward.apply), ("backward", "mul", "middle")),
    "a hook on a gradient": Planted(
        middle(lambda y: _hooked(y * 2)), ("backward", "mul", "middle"), is_from_outside=True,
        only=("operation", "module")
    ),
    "gradients that overflow": Planted(middle(lambda y: _Steep.apply(y) * 1e20), ("backward", "mul",
    "middle")),
    "checkpoint, reentrant, backward": Planted(
        _checkpointed(True, lambda y: torch.sqrt(y * 0)), ("backward", "", "block"),
        only=("operation", "module")
    ),
    "checkpoint, not reentrant, backward": Planted(
        _checkpointed(False, lambda y: torch.sqrt(y * 0)), ("backward", "sqrt", "block"),
        only=("operation", "module")
    ),
    # -- the loss
    "log of 0 in the loss": Planted(
        stack(lin, nn.ReLU), ("backward", "", ""), loss=lambda y: torch.log(y * 0).sum(),
        is_from_outside=True
    ),
    "division in the loss": Planted(
        stack(lin, nn.ReLU), ("backward", "", ""), loss=lambda y: y.sum() / (y * 0).sum(),
        is_from_outside=True
    ),
    "NaN in the target": Planted(
        stack(lin, nn.ReLU, lin), ("backward", "", ""), loss=lambda y: F.mse_loss(y, batch(NAN)),
        is_from_outside=True
    ),
    "cross entropy that ignores all": Planted(
        stack(lin, nn.ReLU, lin), ("backward", "", ""), is_from_outside=True,
        loss=lambda y: F.cross_entropy(y, torch.full((8,), -100)) + y.sqrt().nansum() * 0,
    ),
    # -- all is well
    "a plain model": Planted(stack(lin, nn.ReLU, lin), None),
    "numbers that are large": Planted(middle(lambda y: y * 1e18), None),
    "fp16 autocast": Planted(stack(lin, nn.ReLU, lin), None, autocast=torch.float16),
    "bf16 autocast that overflows": Planted(
        middle(lambda y: torch.exp(y.float().abs() + 1000)), ("forward", "exp", "middle"),
        autocast=torch.bfloat16
    ),
    "fp16 autocast that overflows": Planted(
        lambda: Free(lambda m, x: m.b(m.a(x) * 60000), a=_big(lin()), b=_big(lin())), ("forward",
        "", ""),
        autocast=torch.float16, by_module=("forward", ""),
    ),
}  # fmt: skip


def _big(layer: nn.Module, weight: float = 2.0) -> nn.Module:
    with torch.no_grad():
        layer.weight.fill_(weight)
    return layer


def _hooked(y: Tensor) -> Tensor:
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * NAN)
    return y.sin()
