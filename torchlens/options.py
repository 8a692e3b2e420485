"""What the caller asked for, checked once, before the model runs."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["LogOptions", "check_inputs", "check_model", "positional_names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """The options of `log_forward_pass`; see there."""

    layers_to_save: Any = "all"
    keep_unsaved_layers: bool = True
    output_device: Any = "same"
    activation_postfunc: Callable[[torch.Tensor], Any] | None = None
    mark_input_output_distances: bool = False
    detach_saved_tensors: bool = False
    save_function_args: bool = False
    save_gradients: bool = False
    random_seed: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "keep_unsaved_layers", "mark_input_output_distances", "detach_saved_tensors", "save_function_args",
            "save_gradients",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name} is True or False, not {value!r} ({type(value).__name__}).")
        _check_layers(self.layers_to_save)
        if self.activation_postfunc is not None and not callable(self.activation_postfunc):
            raise TypeError(
                f"activation_postfunc is a function of a tensor, or None, not {self.activation_postfunc!r}. "
                "For instance: activation_postfunc=lambda t: t.mean(0)."
            )
        if self.random_seed is not None and (isinstance(self.random_seed, bool) or not isinstance(self.random_seed, int)):
            raise TypeError(f"random_seed is a whole number, or None to seed nothing, not {self.random_seed!r}.")
        if self.random_seed is not None and not 0 <= self.random_seed < 2**63:
            raise ValueError(f"random_seed is between 0 and 2**63 - 1, not {self.random_seed}.")
        if self.output_device != "same":
            _check_device(self.output_device)

    @property
    def transform(self) -> Callable[[torch.Tensor], Any] | None:
        """What is done to a tensor before it is saved; None if nothing is."""
        steps: list[Callable[[torch.Tensor], Any]] = []
        if self.detach_saved_tensors:
            steps.append(torch.Tensor.detach)
        if self.output_device != "same":
            device = torch.device(self.output_device)
            steps.append(lambda tensor: tensor.to(device))
        if self.activation_postfunc is not None:
            steps.append(self.activation_postfunc)
        if not steps:
            return None

        def transform(tensor: torch.Tensor) -> Any:
            value: Any = tensor
            for step in steps:
                try:
                    value = step(value)
                except Exception as error:
                    name = "activation_postfunc" if step is self.activation_postfunc else "output_device"
                    error.add_note(
                        f"torchlens: raised by {name} on a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}."
                    )
                    raise
            return value

        return transform


def _check_layers(layers: Any) -> None:
    if layers is None or callable(layers):
        return
    keys = layers if isinstance(layers, list | tuple | set) else [layers]
    for key in keys:
        if isinstance(key, bool) or not isinstance(key, str | int) or key == "":
            raise TypeError(
                f"layers_to_save does not understand {key!r} ({type(key).__name__}). It takes 'all', 'none', a layer "
                "label ('conv2d_3_7'), a module address ('features.6'), a number, a part of a label ('conv'), a list "
                "of those, or a function of a layer entry that answers True or False."
            )


def _check_device(device: Any) -> None:
    try:
        torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"output_device is 'same' or a torch device such as 'cpu' or 'cuda:0', not {device!r}.") from error


def check_model(model: Any) -> None:
    """Sees that the model is one."""
    if not isinstance(model, torch.nn.Module):
        hint = " That is the class; make an instance of it." if isinstance(model, type) else ""
        raise TypeError(
            f"model is a torch.nn.Module, not {model!r:.80} ({type(model).__name__}).{hint} To log a function, call it "
            "in the forward of a small module."
        )


def check_inputs(model: Any, input_args: Any, input_kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """The model's positional and keyword arguments, after seeing that its `forward` takes them."""
    check_model(model)
    if input_kwargs is not None and not isinstance(input_kwargs, dict):
        raise TypeError(
            f"input_kwargs is a dict of keyword arguments, or None, not {type(input_kwargs).__name__}. Options of "
            "torchlens are given by keyword: log_forward_pass(model, x, layers_to_save='none')."
        )
    if input_args is None:
        args = []
    elif isinstance(input_args, list | tuple) and not hasattr(input_args, "_fields"):
        args = list(input_args)
    else:
        args = [input_args]
    kwargs = dict(input_kwargs or {})
    if not model._forward_pre_hooks:
        _check_signature(model, args, kwargs)
    return args, kwargs


def positional_names(forward: Any) -> tuple[str, ...] | None:
    """The arguments of a plain method, which takes all by position; None for any other, which takes longer to read."""
    function = getattr(forward, "__func__", None)
    code = getattr(function, "__code__", None)
    if code is None or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) or code.co_kwonlyargcount:
        return None
    if hasattr(function, "__wrapped__") or hasattr(function, "__signature__"):
        return None
    names: tuple[str, ...] = code.co_varnames[1 : code.co_argcount]
    return names


def _check_signature(model: torch.nn.Module, args: list[Any], kwargs: dict[str, Any]) -> None:
    names = positional_names(model.forward)
    if names is not None and not kwargs:
        defaults = model.forward.__func__.__defaults__ or ()  # type: ignore[attr-defined]
        if len(names) - len(defaults) <= len(args) <= len(names):
            return
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a forward written in C, or a scripted one
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = [type(arg).__name__ for arg in args] + [f"{name}={type(arg).__name__}" for name, arg in kwargs.items()]
        raise TypeError(
            f"{type(model).__name__}.forward{signature} cannot be called with ({', '.join(given)}): {error}. "
            "input_args is one tensor or a list of positional arguments (a model whose one argument is a list or "
            "tuple takes [the_list]); input_kwargs is a dict of keyword arguments."
        ) from None
