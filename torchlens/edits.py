"""What edits are made of (sites, and edits for some steps and tokens), and what is done with them.

>>> torchlens.edits.site('h.4.attn', head=3)
>>> torchlens.edits.at(steps=slice(5, None), tokens=-1, add=direction)
>>> torchlens.edits.attribution(history, history.sites('head'), other, metric)
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from torchlens._edit import attribution as _attribution
from torchlens._edit import edge_attribution as _edges
from torchlens._edit import edit_files, heat_maps, lens, precision
from torchlens._edit import path_patching as _paths
from torchlens._edit.changes import Adding, At, Control, Scaling, Splice
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.model_history import ModelHistory
from torchlens._history.sites import Part, Site, Which
from torchlens._text.error_wording import got

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

__all__ = [
    "at",
    "attribution",
    "control",
    "direct_attribution",
    "edge_attribution",
    "faithfulness",
    "load",
    "logit_lens",
    "overlay",
    "path_patching",
    "plot",
    "rounding",
    "run_in",
    "save",
    "site",
    "splice",
]


def site(
    key: str | int | LayerEntry,
    *,
    part: Part | None = None,
    head: Which | None = None,
    neuron: Which | None = None,
    channel: Which | None = None,
    token: Which | None = None,
    index: Any = None,
    directions: torch.Tensor | None = None,
) -> Site:
    """A place in a model: a key of the history, and the part of its value.

    >>> site('h.4.attn', head=3), site('h.4', token=-1), site('h.4.mlp.act', neuron=[5, 7])
    >>> site('h.4', part='before', directions=vector)

    key: a key of the history (a module, a label, a number), or an entry.
    part: 'before' is what the module was given (an edit changes it for all that read it, such as
        the residual connection around the module), 'after' what it returned; 'q', 'k', 'v' and
        'weights' are what the attention in it reads, and its softmax.
    head, neuron, channel, token: which of them: a number, a slice or a list.
    index: any other index, as in `value[index]`.
    directions: a vector, or a matrix with one in each row, along the last dimension: the edit is
        given the coordinates in the subspace, and changes nothing outside it.
    """
    return Site(key, part, head, neuron, channel, token, index, directions)


def at(
    steps: int | slice | Sequence[int] | None = None,
    tokens: Which | None = None,
    *,
    add: torch.Tensor | None = None,
    scale: float | None = None,
    edit: Any = None,
) -> At:
    """An edit at some calls of the model (`generate` makes one for each step, from 0) and tokens.

    >>> with torchlens.edit(model, {'h.4': at(steps=slice(5, None), tokens=-1, add=direction)}):
    ...     model.generate(ids)

    Steps are calls of the model inside the block; step 0 of `generate` reads the prompt. Tokens are
    those of the value in that call: with a key-value cache, later steps have one token. What was
    cached before an edit stays as it is; what an edited step adds to the cache is made from edited
    values, and later steps read it.

    add: a direction that is added to the value. scale: a factor. edit: any other edit.
    """
    given = [
        name for name, own in (("add", add), ("scale", scale), ("edit", edit)) if own is not None
    ]
    if len(given) != 1:
        raise TypeError(f"Give one of add=, scale= and edit=, got {', '.join(given) or 'none'}.")
    if add is not None:
        if not isinstance(add, torch.Tensor):
            raise TypeError(f"add must be a tensor, got {got(add)}.")
        return At(steps, tokens, Adding(add))
    return At(steps, tokens, Scaling(scale) if scale is not None else edit)


def splice(module: Callable[[torch.Tensor], Any], *, keep_error: bool = False) -> Splice:
    """An edit that puts a module in: it is given the value, and its result takes the value's place.

    >>> {'h.4': splice(autoencoder)}, {site('h.4', token=-1): splice(probe)}

    keep_error: add what the module does not reproduce, without a gradient: the model computes what
        it did before, and gradients go through the module.
    """
    if not callable(module):
        raise TypeError(f"splice takes a module or a function of the value, got {got(module)}.")
    return Splice(module, keep_error)


def control(edit: Any, seed: int = 0) -> At | Control:
    """The control of an edit: a change of the same size, in a random direction.

    >>> history.sweep(history.sites('head'), ['zero', control('zero')], metric)

    Each vector along the last dimension changes by as much as the edit changes it. `edit` is any
    edit that depends on nothing random, or another history.
    """
    if isinstance(edit, At):
        return replace(edit, edit=Control(edit.edit, seed))
    return Control(edit, seed)


# -- attribution -----------------------------------------------------------------------------------


def attribution(
    history: ModelHistory,
    sites: Iterable[Any],
    edit: Any,
    metric: Callable[[Any], Any],
    *,
    through_attention: bool = True,
    drop: Any = None,
    check: int = 0,
    seed: int = 0,
) -> "pandas.DataFrame":
    """Estimates what `history.sweep(sites, edit, metric)` would give, from one backward pass.

    >>> attribution(history, history.sites('head'), other, metric, check=20)

    The estimate of a site is the change that the edit (or another history) makes there, times the
    gradient of the metric. `control` is that of a random change of the same size.

    metric: a function of the output that returns a tensor with one element.
    through_attention: for sites with part='q' and 'k', compute the attention exactly and estimate
        from its result on (AtP*'s first correction), as gradients of a saturated softmax mislead.
    drop: 'residual', or sites: adds the column `dropped`, the mean size of the estimates without
        the gradient through one of them at a time (AtP*'s second correction, for effects that
        cancel). 'residual' is what each block adds to the residual stream.
    check: the exact effect for so many random sites, in the column `exact`; the correlation of the
        estimates with it is in `table.attrs['correlation']`.
    """
    return _attribution.attribution(
        history, sites, edit, metric, through_attention=through_attention, drop=drop, check=check,
        seed=seed,
    )  # fmt: skip


def edge_attribution(
    history: ModelHistory,
    sites: Iterable[Any],
    edit: Any,
    metric: Callable[[Any], Any],
    *,
    steps: int = 0,
) -> "pandas.DataFrame":
    """Scores the edges between sites, the strongest first: edge attribution patching, in any model.

    >>> edge_attribution(history, ['wte', *history.sites('head'), 'h.0.mlp'], other, metric)

    An edge is all that leads from one site to another, or to the output, without passing a third.
    Its score estimates what the metric would gain if only this edge carried the edited value.

    sites: should lie on every way from what the edit changes to the output, the embedding included.
    steps: 0 takes the gradient at the recorded values. Another number takes the mean gradient at so
        many points between them and the edited ones, with the first sites moved (EAP-IG).
    """
    return _edges.edge_attribution(history, sites, edit, metric, steps=steps)


def faithfulness(
    history: ModelHistory,
    sites: Iterable[Any],
    edit: Any,
    metric: Callable[[Any], Any],
    edges: "pandas.DataFrame",
    counts: Sequence[int],
    *,
    seed: int = 0,
) -> "pandas.DataFrame":
    """How much of the metric the first edges of a table restore: 0 is the edit everywhere, 1 is
    every edge as recorded.

    >>> faithfulness(history, sites, other, metric, edges, [1, 3, 10, 30])

    Exact: the model is computed with the edited values on all other edges. `control` has as many
    edges chosen at random. The other arguments are those of `edge_attribution`.
    """
    return _edges.faithfulness(history, sites, edit, metric, edges, counts, seed=seed)


def path_patching(
    history: ModelHistory,
    senders: Iterable[Any],
    receivers: Iterable[Any],
    edit: Any,
    metric: Callable[[Any], Any],
    *,
    hold: Iterable[Any] = (),
) -> "pandas.DataFrame":
    """What follows if only one receiver sees the edit of a sender, for all pairs of them.

    >>> path_patching(history, heads, [site('h.11.attn', part='q', head=3)], other, metric,
    ...               hold=[*history.sites('head'), *mlps])

    hold: sites that keep their recorded values while the receiver is computed: all others that the
        edit is not to pass.
    """
    return _paths.path_patching(history, senders, receivers, edit, metric, hold=hold)


def logit_lens(
    history: ModelHistory, *, token: int = -1, stream: Any = None, seed: int = 0
) -> "pandas.DataFrame":
    """What the end of the model makes of the residual stream after each block.

    >>> logit_lens(history)[['module', 'top', 'probability', 'answer']]

    For each row of the batch: the `top` class at a token with its `probability`, the probability of
    the `answer` that the model gives in the end, and the `divergence` of that final distribution
    from this one. `control` is the answer's probability for a random vector of the same length.
    The end is what the model itself ran behind the last residual connection, or behind `stream`.
    """
    return lens.logit_lens(history, token=token, stream=stream, seed=seed)


def direct_attribution(
    history: ModelHistory, metric: Callable[[torch.Tensor], Any], *, stream: Any = None
) -> "pandas.DataFrame":
    """The share of each block in a logit: direct logit attribution.

    >>> direct_attribution(history, lambda logits: logits[0, -1, 42] - logits[0, -1, 7])

    metric: a linear function of the output. The shares add up to it: the scale of the last norm is
    the recorded one. `stream` is as for `logit_lens`.
    """
    return lens.direct_attribution(history, metric, stream=stream)


# -- precision -------------------------------------------------------------------------------------


def rounding(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """An edit that rounds a value to another dtype and back: bf16, fp16, an 8-bit float, or int8
    with one scale for each tensor.

    >>> history.sweep(history.sites('operation'), rounding(torch.bfloat16)).to_pandas()
    """
    return precision.rounding(dtype)


def run_in(
    model: torch.nn.Module, modules: Sequence[str], dtype: torch.dtype
) -> AbstractContextManager[torch.nn.Module]:
    """Runs some modules in another dtype inside a block: their parameters, their inputs and what
    they compute. What they return has the dtype of before.

    >>> with run_in(model, ['h.3.mlp', 'h.4.mlp'], torch.bfloat16):
    ...     model(ids)

    torch.int8 rounds parameters, inputs and results; sums are those of the former dtype.
    """
    return precision.run_in(model, modules, dtype)


# -- tables, pictures and files --------------------------------------------------------------------


def plot(
    table: Any,
    value: str | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
) -> "Figure":
    """Draws a sweep or a table: a heat map of keys and their parts for each edit, or bars with the
    other edits and the control as marks.

    >>> plot(history.sweep([site(key, token=t) for key in keys for t in range(9)], other, metric))

    value: the column that is drawn; by default `metric` or `estimate`. path: a file to write.
    Needs matplotlib: pip install 'torchlens[plot]'.
    """
    return heat_maps.plot(table, value, path, title=title)


def overlay(table: Any, value: str = "metric") -> dict[str, float]:
    """The largest size of a column for each key, to colour a page or a drawing with.

    >>> history.explore('model.html', overlays={'effect': overlay(sweep)})
    """
    return heat_maps.overlay(table, value)


def save(edits: Mapping[Any, Any], path: str | os.PathLike[str]) -> None:
    """Writes edits to a small safetensors file, which another person loads.

    >>> save({'h.4': at(add=direction), site('h.5.attn', head=3): 0.0}, 'steering.safetensors')

    Numbers, words, tensors, entries of other histories (their values) and `at(...)` can be saved;
    functions and modules cannot. Needs safetensors: pip install 'torchlens[trace]'.
    """
    edit_files.save_edits(edits, path)


def load(path: str | os.PathLike[str]) -> dict[Any, Any]:
    """The edits of a file. Nothing in the file is run.

    >>> with torchlens.edit(model, torchlens.edits.load('steering.safetensors'), history):
    ...     model.generate(ids)
    """
    return edit_files.load_edits(path)
