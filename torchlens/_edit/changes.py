"""What an edit does to a value: numbers, tensors, functions, words, and edits for some steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any, NamedTuple

import torch

from torchlens._history.layer_entry import LayerEntry
from torchlens._history.sites import Place, Site, Which, axes_of
from torchlens._text.error_wording import check_choice, got
from torchlens.errors import EditError

Tensor = torch.Tensor
WORDS = ("zero", "mean", "resample")
ACCEPTED = (
    "a number, a tensor, an entry of another history, a function of the value, 'zero', 'mean', "
    "'resample', torchlens.edits.at(...) or torchlens.edits.splice(...)"
)


@dataclass(frozen=True, slots=True, eq=False)
class At:
    """An edit at some steps and tokens only. Make one with `torchlens.edits.at(...)`."""

    steps: int | slice | Sequence[int] | None
    tokens: Which | None
    edit: Any

    def includes(self, step: int) -> bool:
        """True if the edit acts at this step."""
        if self.steps is None:
            return True
        if isinstance(self.steps, slice):
            return step in range(*self.steps.indices(step + 1))
        return step in (self.steps if isinstance(self.steps, Sequence) else (self.steps,))


def own_generator(seed: int) -> torch.Generator:
    """A generator for controls, with other numbers than weights that were made with this seed."""
    return torch.Generator().manual_seed(seed + 1_000_003)


@dataclass(frozen=True, slots=True, eq=False)
class Control:
    """A change in a random direction, as large as that of an edit. Make one with
    `torchlens.edits.control(...)`.
    """

    edit: Any
    seed: int = 0

    def part(self, old: Tensor, new: Tensor) -> Tensor:
        """The control of a change: every vector along the last dimension moves as far."""
        random = torch.randn(old.shape, generator=own_generator(self.seed)).to(old)
        size = torch.linalg.vector_norm(new - old, dim=-1, keepdim=True)
        length = torch.linalg.vector_norm(random, dim=-1, keepdim=True).clamp_min(1e-30)
        return old + random / length * size


class Edited(NamedTuple):
    """A place with its edit; `recorded` gives the value that the history recorded there."""

    place: Place
    edit: Any
    recorded: Callable[[], Tensor]

    def value(self, value: Tensor, step: int = 0) -> Tensor | None:
        """The value with the edit; None if it does not act at this step."""
        place, edit = self.place, self.edit
        if isinstance(edit, At):
            if not edit.includes(step):
                return None
            if edit.tokens is not None:
                site = replace(place.site, token=edit.tokens)
                place = Place(place.entry, axes_of(site, value.shape), site)
            edit = edit.edit
        part = place.read(value)
        new = _new_part(part, edit, self.recorded, place)
        return place.write(value, fitting(new, part, place.site))


def check_edit(site: Site, edit: Any) -> None:
    """Raises unless an edit is one of those accepted."""
    if isinstance(edit, At):
        if edit.tokens is not None and site.token is not None:
            raise ValueError(f"{site} names tokens, and so does at(tokens=...). Name them once.")
        edit = edit.edit
    edit = edit.edit if isinstance(edit, Control) else edit
    if isinstance(edit, str):
        check_choice(f"the edit of {site}", edit, WORDS)
    elif not callable(edit) and not isinstance(edit, Number | Tensor | LayerEntry):
        raise TypeError(f"The edit of {site} must be {ACCEPTED}, got {got(edit)}.")


def _new_part(part: Tensor, edit: Any, recorded: Callable[[], Tensor], place: Place) -> Any:
    if isinstance(edit, Control):
        new = _new_part(part, edit.edit, recorded, place)
        return edit.part(part, fitting(new, part, place.site))
    if isinstance(edit, str):
        return place.read(_WORDS[edit](recorded(), place).expand_as(recorded()))
    if isinstance(edit, Tensor):
        return edit
    if isinstance(edit, Number):
        return torch.full_like(part, edit)  # type: ignore[arg-type]
    if isinstance(edit, LayerEntry):
        value = edit.tensor_contents
        if not isinstance(value, Tensor):
            raise EditError(
                f"The edit of {place.site} is {edit.layer_label!r} of another history, whose value "
                "was not saved. Log it with layers_to_save='all'."
            )
        return place.read(value)
    return edit(part)


def fitting(new: Any, part: Tensor, site: Site) -> Tensor:
    """The new part, expanded to the shape that it must have."""
    if not isinstance(new, Tensor):
        raise EditError(
            f"The edit of {site} returned {got(new)}; it must return a tensor of shape "
            f"{tuple(part.shape)}."
        )
    if new.dtype != part.dtype:
        raise EditError(
            f"The edit of {site} gave {new.dtype}, and the value there is {part.dtype}: convert "
            f"it with .to({part.dtype})."
        )
    try:
        return new.to(part.device).expand(part.shape)
    except RuntimeError:
        raise EditError(
            f"The edit of {site} gave a tensor of shape {tuple(new.shape)}, and the value there "
            f"has the shape {tuple(part.shape)}. Give that shape, or one that expands to it."
        ) from None


def _zero(value: Tensor, place: Place) -> Tensor:
    return torch.zeros_like(value)


def _mean(value: Tensor, place: Place) -> Tensor:
    """The mean over the batch and over tokens or pixels: what features are on average."""
    if not value.is_floating_point():
        raise TypeError(f"{place.site}: {value.dtype} values have no mean. Choose 'zero'.")
    features = {value.ndim - 1}
    if value.ndim == 4:  # heads, or channels of an image
        features = {1, 3} if "head" in place.axes or place.site.part else {1}
    return value.mean([dim for dim in range(value.ndim) if dim not in features], keepdim=True)


def _resample(value: Tensor, place: Place) -> Tensor:
    """The values of other rows of the batch."""
    if len(value) < 2:
        raise ValueError(
            f"{place.site}: 'resample' takes values of other inputs in the batch, and there is one "
            "input. Log a batch, or give the entry of another history: {site: other['...']}."
        )
    order = torch.randperm(len(value) - 1, generator=torch.Generator().manual_seed(0)) + 1
    shifted = torch.cat([order, order.new_zeros(1)])  # one cycle through all rows
    target = torch.empty_like(shifted)
    target[torch.cat([order.new_zeros(1), order])] = shifted
    return value[target.to(value.device)]


_WORDS: dict[str, Callable[[Tensor, Place], Tensor]] = {
    "zero": _zero, "mean": _mean, "resample": _resample,
}  # fmt: skip


# -- edits that are made by functions --------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Adding:
    """An edit that adds a direction, in the dtype of the value."""

    direction: Tensor

    def __call__(self, part: Tensor) -> Tensor:
        return part + self.direction.to(part.device, part.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """An edit that multiplies the value."""

    factor: float

    def __call__(self, part: Tensor) -> Tensor:
        return part * self.factor


class Splice:
    """An edit that puts a module in: its result takes the place of the value.

    With `keeps_error`, what the module does not reproduce of the value is added to its result,
    without a gradient: the value stays, and the gradient goes through the module.
    """

    def __init__(self, module: Callable[[Tensor], Any], keeps_error: bool) -> None:
        self.module = module
        self.keeps_error = keeps_error

    def __call__(self, part: Tensor) -> Tensor:
        result = self.module(part)
        new: Any = result[0] if isinstance(result, tuple) and result else result
        if self.keeps_error and isinstance(new, Tensor):
            new = new + (part - new).detach()
        return new
