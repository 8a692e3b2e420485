"""What edits are made of: sites, and edits for some steps and tokens.

>>> torchlens.edits.site('h.4.attn', head=3)
>>> torchlens.edits.at(steps=slice(5, None), tokens=-1, add=direction)
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchlens._edit.changes import At, Splice, adding, scaling
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.sites import Part, Site, Which
from torchlens._text.error_wording import got

__all__ = ["at", "site", "splice"]


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
        return At(steps, tokens, adding(add))
    return At(steps, tokens, scaling(scale) if scale is not None else edit)


def splice(module: Callable[[torch.Tensor], Any], *, keep_error: bool = False) -> Splice:
    """An edit that puts a module in: it is given the value, and its result takes the value's place.

    >>> {'h.4': splice(autoencoder)}, {site('h.4', token=-1): splice(probe)}

    keep_error: add what the module does not reproduce, without a gradient: the model computes what
        it did before, and gradients go through the module.
    """
    if not callable(module):
        raise TypeError(f"splice takes a module or a function of the value, got {got(module)}.")
    return Splice(module, keep_error)
