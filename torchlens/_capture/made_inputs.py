"""Inputs that are made for the user: random tensors of given sizes, or text through a tokenizer."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias, TypedDict

import torch

from torchlens._capture.options import forward_names
from torchlens._recording.called_model import model_of
from torchlens._recording.frameworks import is_for_jax
from torchlens._text.error_wording import got, is_whole

Size: TypeAlias = Sequence[int]
InputSize: TypeAlias = Size | Sequence[Size] | Mapping[str, Size]
Dtypes: TypeAlias = torch.dtype | Sequence[torch.dtype] | Mapping[str, torch.dtype]


class InputKeywords(TypedDict, total=False):
    """What inputs are made from; see `log_forward_pass`."""

    input_size: InputSize | None
    dtypes: Dtypes | None
    device: str | torch.device | None
    tokenizer: Any


def given_inputs(
    model: Any,
    input_args: Any,
    input_kwargs: Mapping[str, Any] | None,
    input_size: InputSize | None = None,
    dtypes: Dtypes | None = None,
    device: str | torch.device | None = None,
    tokenizer: Any = None,
) -> tuple[Any, Mapping[str, Any] | None]:
    """`input_args` and `input_kwargs`, with the inputs that are to be made."""
    if tokenizer is not None:
        if input_size is not None or dtypes is not None:
            raise ValueError("tokenizer= makes the inputs from text: leave out input_size, dtypes.")
        return [], {**_tokens(model, input_args, tokenizer, device), **(input_kwargs or {})}
    if input_size is None:
        _check_unused(dtypes=dtypes, device=device)
        return input_args, input_kwargs
    if input_args is not None:
        raise ValueError("Give the inputs (input_args) or their sizes (input_size), not both.")
    if is_for_jax(model):
        raise TypeError("input_size makes torch tensors; give a JAX function its arrays.")
    made = _made_inputs(model, _sizes(input_size), dtypes, device)
    if isinstance(input_size, Mapping):
        return [], {**{str(key): value for key, value in made.items()}, **(input_kwargs or {})}
    return list(made.values()), input_kwargs


def _check_unused(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise TypeError(
                f"{name} is for inputs that are made: give input_size=(1, 3, 224, 224), say. "
                "Saved tensors are moved by output_device."
            )


def _made_inputs(
    model: Any, sizes: Mapping[int | str, tuple[int, ...]], dtypes: Any, device: Any
) -> dict[int | str, torch.Tensor]:
    """Random tensors by position or name."""
    kinds = _kinds(dtypes, sizes, _float_type(model))
    place = _place(model) if device is None else device
    # A generator of its own: the global ones stay as they are.
    generator = torch.Generator().manual_seed(0)
    return {
        key: _random_tensor(size, kinds[key], generator).to(place) for key, size in sizes.items()
    }


class MadeInputsNote:
    """Adds to an exception of the model, raised in its block, that its inputs were made."""

    def __init__(self, input_size: InputSize | None, dtypes: Dtypes | None) -> None:
        self._input_size = input_size if dtypes is None else None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._input_size is not None and isinstance(error, Exception):
            error.add_note(
                "torchlens: the inputs were random numbers of floating point, made from "
                f"input_size={self._input_size}. For others, give dtypes=[torch.long], say."
            )


def _sizes(given: Any) -> dict[int | str, tuple[int, ...]]:
    """The sizes by position or name."""
    if isinstance(given, Mapping):
        named: dict[int | str, Any] = dict(given)
    elif _is_size(given):
        named = {0: given}
    elif isinstance(given, list | tuple):
        named = dict(enumerate(given))
    else:
        named = {}
    if not named or not all(_is_size(size) or tuple(size) == () for size in _checked(named)):
        raise TypeError(
            "input_size must be a size such as (1, 3, 224, 224), a list of sizes, or a dict of "
            f"sizes by argument, got {got(given)}."
        )
    for size in named.values():
        if any(int(number) < 0 for number in size):
            raise ValueError(f"A size has no negative numbers, got {tuple(size)} in input_size.")
    return {key: tuple(map(int, size)) for key, size in named.items()}


def _checked(named: dict[int | str, Any]) -> list[Any]:
    return [size if isinstance(size, list | tuple) else (None,) for size in named.values()]


def _is_size(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(is_whole, value))


def _kinds(
    given: Any, sizes: Mapping[int | str, Any], default: torch.dtype
) -> dict[int | str, torch.dtype]:
    """The dtype of each input."""
    if isinstance(given, torch.dtype) or given is None:
        return dict.fromkeys(sizes, given or default)
    is_mapping = isinstance(given, Mapping)
    listed = list(given.values()) if is_mapping else given
    if not _are_dtypes(listed):
        raise TypeError(
            "dtypes must be a torch.dtype, a list of them, or a dict of them by argument, got "
            f"{got(given)}."
        )
    if is_mapping:
        unknown = [key for key in given if key not in sizes]
        if unknown:
            raise ValueError(f"dtypes names {unknown[0]!r}, and input_size has {list(sizes)}.")
        return {key: given.get(key, default) for key in sizes}
    if len(listed) != len(sizes):
        raise ValueError(
            f"dtypes must have one dtype for each size: {len(sizes)}, got {len(listed)}."
        )
    return dict(zip(sizes, listed, strict=True))


def _are_dtypes(given: Any) -> bool:
    return isinstance(given, list | tuple) and all(isinstance(one, torch.dtype) for one in given)


def _random_tensor(
    size: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Numbers from 0 to 1; zeros for integers, which are often indices; True for booleans."""
    if dtype is torch.bool:
        return torch.ones(size, dtype=dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(size, generator=generator).to(dtype)
    return torch.zeros(size, dtype=dtype)


def _weights(model: Any) -> Iterator[torch.Tensor]:
    module = model_of(model)
    if isinstance(module, torch.nn.Module):
        yield from chain(module.parameters(), module.buffers())


def _place(model: Any) -> torch.device:
    """The device of the model's first weight."""
    return next((tensor.device for tensor in _weights(model)), torch.device("cpu"))


def _float_type(model: Any) -> torch.dtype:
    """The floating-point type of the model's first weight."""
    kinds = (tensor.dtype for tensor in _weights(model) if tensor.is_floating_point())
    return next(kinds, torch.get_default_dtype())


def _tokens(model: Any, text: Any, tokenizer: Any, device: Any) -> dict[str, torch.Tensor]:
    """Text as the tokenizer of a Hugging Face model makes tensors of it."""
    is_text = isinstance(text, str) or (
        isinstance(text, list | tuple) and text and all(isinstance(one, str) for one in text)
    )
    if not is_text:
        raise TypeError(
            f"With tokenizer=, input_args must be a string or a list of strings, got {got(text)}."
        )
    if not callable(tokenizer):
        raise TypeError(
            "tokenizer must be a tokenizer of Hugging Face, as AutoTokenizer.from_pretrained "
            f"returns it, got {got(tokenizer)}."
        )
    is_one = isinstance(text, str)
    made = tokenizer(text if is_one else list(text), return_tensors="pt", padding=not is_one)
    place = _place(model) if device is None else device
    module = model_of(model)
    known = forward_names(module)
    return {
        name: tensor.to(place)
        for name, tensor in dict(made).items()
        if name in known or name == "input_ids" or not known
    }
