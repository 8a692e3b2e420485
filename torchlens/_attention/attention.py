"""Which queries look at which keys: the attention weights of a call, checked against its result."""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchlens._attention.eager import eager_attention
from torchlens._attention.fused import Rebuilt, first_queries, is_fused, rebuilt, thinned
from torchlens._history.attention_parts import product_after, softmax_before
from torchlens._history.log import Log
from torchlens._history.receipt import exported_receipt
from torchlens._recording.tolerance import TOLERANCE, epsilon_of
from torchlens._recording.unseen import NoTorchFunction, unseen
from torchlens._recording.wrappers import why_valueless
from torchlens._replay.call_arguments import call_arguments
from torchlens._text.error_wording import got, is_whole
from torchlens._text.whole_files import whole_file

if TYPE_CHECKING:
    import os

    import matplotlib.figure

Tensor = torch.Tensor
_MOST_SHOWN = 16  # heads in a figure


@dataclass(frozen=True)
class Attention:
    """The attention of one call.

    `weights` has the shape (..., heads, queries, keys); each query's weights sum to 1, or to 0
    where a mask hides all keys. `query`, `key` and `value` are what they were computed from, as
    (..., heads, tokens, channels); None where the log does not show it.

    >>> attention = history.attention('layers.3')
    >>> attention.weights[0, 3], attention.head(3).query
    >>> attention.plot('attention.png')
    """

    layer: str
    weights: Tensor
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    # Weak, so that the attention does not keep the log's tensors.
    _log: Callable[[], Log | None] = field(default=lambda: None, repr=False, compare=False)

    @property
    def num_heads(self) -> int:
        """The number of heads; 1 if there is no dimension of heads."""
        return self.weights.shape[-3] if self.weights.dim() > 2 else 1

    def head(self, number: int) -> "Attention":
        """The attention of one head, without the dimension of heads."""
        if not is_whole(number):
            raise TypeError(f"head must be a whole number, got {got(number)}.")
        if not -self.num_heads <= number < self.num_heads:
            raise IndexError(
                f"Head {number} is out of range: {self.layer!r} has {self.num_heads}, numbered 0 "
                f"to {self.num_heads - 1}."
            )

        def own(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or tensor.dim() < 3 or tensor.shape[-3] != self.num_heads:
                return None
            return tensor.select(-3, number)

        weights = own(self.weights)
        return replace(
            self,
            weights=self.weights if weights is None else weights,
            query=own(self.query), key=own(self.key), value=own(self.value),
        )  # fmt: skip

    def plot(
        self, path: "str | os.PathLike[str] | None" = None, example: int = 0
    ) -> "matplotlib.figure.Figure":
        """A figure with a picture per head, queries downward and keys to the right, of one example
        of the batch; with a path, also as a file.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "plot needs the package matplotlib: pip install 'torchlens[plot]'."
            ) from error
        heads = self._heads_of(example)[:_MOST_SHOWN]
        columns = math.ceil(math.sqrt(len(heads)))
        rows = math.ceil(len(heads) / columns)
        figure = Figure(figsize=(2.6 * columns + 0.6, 2.6 * rows + 0.6), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for number, (axis, weights) in enumerate(zip(axes, heads, strict=False)):
            picture = axis.imshow(weights.numpy(), vmin=0, cmap="viridis", interpolation="nearest")
            figure.colorbar(picture, ax=axis, shrink=0.8)
            axis.set_title(f"head {number}" if len(heads) > 1 else "", fontsize=9)
            axis.tick_params(labelsize=7)
        for axis in axes[len(heads) :]:
            axis.set_axis_off()
        left_out = self.num_heads - len(heads)
        more = f", the first {len(heads)} of {self.num_heads} heads" if left_out > 0 else ""
        figure.suptitle(f"{self.layer}{more}", fontsize=10)
        figure.supylabel("query", fontsize=9)
        figure.supxlabel("key", fontsize=9)
        if path is not None:
            with whole_file(Path(path)) as beside:
                figure.savefig(beside, metadata=self._metadata(Path(path).suffix))
        return figure

    def _metadata(self, suffix: str) -> dict[str, str] | None:
        """The receipt, for the formats that have a place for it."""
        place = {".png": "Description", ".svg": "Description", ".pdf": "Subject"}.get(suffix)
        log = self._log()
        return None if log is None or place is None else {place: str(exported_receipt(log))}

    def _heads_of(self, example: int) -> Tensor:
        """The weights of one example as (heads, queries, keys)."""
        weights = self.weights.detach().float().cpu()
        if weights.dim() < 3:
            return weights[None]
        examples = weights.reshape(-1, *weights.shape[-3:])
        if not -len(examples) <= example < len(examples):
            raise IndexError(f"example is {example}, and the batch has {len(examples)}.")
        return examples[example]

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.weights.shape))
        return f"<Attention of {self.layer}: weights {shape}>"


def calls_of_attention(log: Log, entries: Sequence[int]) -> list[int]:
    """Those of the entries that are the result of an attention: of a fused kernel, or the product
    of a softmax with values.
    """
    found = []
    for entry in entries:
        row = log.row(entry)
        if is_fused(row.operation.layer_type):
            if not row.output_index:
                found.append(entry)
        elif softmax_before(log, entry) is not None:
            found.append(entry)
    return found


def call_meant(log: Log, entry: int) -> int | None:
    """The result of the attention that an entry belongs to: itself, or that of its softmax."""
    after = product_after(log, entry)
    (found,) = calls_of_attention(log, [entry] if after is None else [after]) or (None,)
    return found


def attention_of(log: Log, entry: int) -> Attention:
    """The attention whose result is an entry; raises ValueError if it cannot be rebuilt."""
    label = log.label(entry)
    with unseen(), NoTorchFunction():
        try:
            found = _rebuilt(log, entry)
            _check(log.value(entry), found)
        except ValueError as reason:
            raise ValueError(
                f"The attention of {label!r} cannot be rebuilt: {str(reason).rstrip('.')}."
            ) from reason
    dtype = log.row(entry).dtype
    query, key, value = (None if own is None else own.to(dtype) for own in found[1:4])
    return Attention(label, found.weights.to(dtype), query, key, value, weakref.ref(log))


def small_attention(log: Log, entry: int, side: int) -> tuple[Tensor, int, int]:
    """The attention of the first example, thinned to `side` queries and keys, as (heads, queries,
    keys), with the number of queries and of keys; costs little for long sequences.
    """
    with unseen(), NoTorchFunction():
        found = _rebuilt(log, entry, side)
        logged = log.value(entry)
        if found.result.shape != logged.shape:
            logged = first_queries(logged, side)
        _check(logged, found)
    weights = found.weights.float()
    if weights.dim() < 3:
        weights = weights[None]
    weights = first_queries(weights, side)
    num_queries = log.row(entry).shape[-2]
    return weights[..., thinned(weights.shape[-1], side)], num_queries, weights.shape[-1]


def _rebuilt(log: Log, entry: int, num_queries: int | None = None) -> Rebuilt:
    """The attention of all queries, or of some of the first example if the kernel is asked for
    them only.
    """
    transform = log.options.transform if log.options is not None else None
    if getattr(transform, "activation_postfunc", None) is not None:
        raise ValueError("the saved tensors were transformed by activation_postfunc")
    if log.recording.framework != "torch":
        raise ValueError("only models of PyTorch can be asked for it")
    softmax = softmax_before(log, entry)
    if softmax is not None:
        return eager_attention(log, entry, softmax)
    call = call_arguments(log, entry, (entry,))
    for value in (*call.values(), log.value(entry)):
        if isinstance(value, Tensor) and (value.is_nested or why_valueless(value) is not None):
            raise ValueError("its tensors are nested, or have no values")
    return rebuilt(log.row(entry).operation.layer_type, call, num_queries)


def _check(logged: Any, found: Rebuilt) -> None:
    """Raises unless the weights give the logged result, up to rounding."""
    if logged.shape != found.result.shape:
        raise ValueError(
            f"its result has the shape {tuple(logged.shape)}, not {tuple(found.result.shape)}"
        )
    own = logged.detach().to(found.result.dtype)
    error = (own - found.result).abs()
    bound = TOLERANCE * epsilon_of(logged.dtype, found.result.dtype) * found.scale
    is_off = ~((error <= bound + torch.finfo(torch.float32).tiny) | (own == found.result))
    if bool(is_off.any()):
        raise ValueError(
            "the result computed from the rebuilt weights differs from the logged one by "
            f"{float(error[is_off].max()):.3g}, more than rounding explains"
        )
