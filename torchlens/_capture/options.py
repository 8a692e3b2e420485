"""Options and inputs of a log, checked once, before the model runs."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchlens._recording.frameworks import OtherModel, is_for_jax, title_of
from torchlens._recording.trees import Path, named_tensors
from torchlens._text.error_wording import got, is_whole


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
            "keep_unsaved_layers", "mark_input_output_distances", "detach_saved_tensors",
            "save_function_args",
            "save_gradients",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {got(value)}.")
        object.__setattr__(self, "layers_to_save", checked_layers(self.layers_to_save))
        if self.activation_postfunc is not None and not callable(self.activation_postfunc):
            raise TypeError(
                "activation_postfunc must be a function of a tensor, or None, got "
                f"{got(self.activation_postfunc)}. For instance: activation_postfunc=lambda t: "
                "t.mean(0)."
            )
        if self.random_seed is not None:
            if not is_whole(self.random_seed):
                raise TypeError(
                    "random_seed must be a whole number, or None to seed nothing, got "
                    f"{got(self.random_seed)}."
                )
            object.__setattr__(self, "random_seed", int(self.random_seed))  # numpy's
            if not 0 <= self.random_seed < 2**63:
                raise ValueError(
                    f"random_seed must be between 0 and 2**63 - 1, got {self.random_seed}."
                )
        if self.output_device != "same":
            _check_device(self.output_device)

    @property
    def transform(self) -> "Transform | None":
        """The transform of tensors before they are saved; None if there is none."""
        transform = Transform(
            self.detach_saved_tensors, self.output_device, self.activation_postfunc
        )
        return None if transform == Transform() else transform


@dataclass(frozen=True, slots=True)
class Transform:
    """The transforms of a tensor before it is saved, applied in this order."""

    detach_saved_tensors: bool = False
    output_device: Any = "same"
    activation_postfunc: Callable[[torch.Tensor], Any] | None = None

    def __call__(self, tensor: torch.Tensor) -> Any:
        value: Any = tensor.detach() if self.detach_saved_tensors else tensor
        option = "output_device"
        try:
            if self.output_device != "same":
                value = value.to(self.output_device)
            if self.activation_postfunc is not None:
                option = "activation_postfunc"
                value = self.activation_postfunc(value)
        except Exception as error:
            hint = (
                " A tensor on the meta device has no values to move; use output_device='same'."
                if tensor.is_meta
                else ""
            )
            error.add_note(
                f"torchlens: raised by {option} on a tensor of shape {tuple(tensor.shape)}, "
                f"{tensor.dtype}.{hint if option == 'output_device' else ''}"
            )
            raise
        return value


def checked_layers(layers: Any) -> Any:
    """`layers_to_save`, checked: 'all', 'none', keys of layers, or a predicate."""
    are_several = isinstance(layers, list | tuple | set | frozenset)
    keys = list(layers) if are_several else [] if layers is None else [layers]
    if not keys:
        return "none"
    word = str(keys[0]).lower()
    if len(keys) == 1 and word in ("all", "none"):  # also ['all']
        return word
    for key in keys:
        if not _is_key(key) and (are_several or not _is_predicate(key)):
            raise TypeError(
                "layers_to_save must be 'all', 'none', a key, a list of keys, or a function of a "
                f"layer entry that returns True or False, got {got(key)}. {_layers_hint(key)}"
            )
    return layers


def _is_key(key: Any) -> bool:
    return is_whole(key) or (isinstance(key, str) and key != "")


def _is_predicate(key: Any) -> bool:
    return callable(key) and not isinstance(key, type | torch.nn.Module)


def _layers_hint(key: Any) -> str:
    if isinstance(key, torch.nn.Module):
        return (
            "A module is named by its address in the model, 'features.6', as "
            "model.named_modules() lists it."
        )
    if isinstance(key, type) and issubclass(key, torch.nn.Module):
        return (
            "To save the outputs of all modules of that class: layers_to_save=[name for name, "
            f"module in model.named_modules() if isinstance(module, {key.__name__})]."
        )
    return (
        "A key is a layer label ('conv2d_3_7'), a part of one ('conv'), a module address "
        "('features.6') or a number."
    )


def _check_device(device: Any) -> None:
    try:
        torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            "output_device must be 'same' or a torch device such as 'cpu' or 'cuda:0', got "
            f"{got(device)}."
        ) from error
    # AssertionError: torch was built without support for the device.
    try:
        torch.empty(0, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise ValueError(
            "output_device must be a device that this machine and this torch have, got "
            f"{got(device)}: {str(error).strip().partition(chr(10))[0]}. To keep saved tensors "
            "where they are: output_device='same'."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """What to keep of a pass; `saves` and `max_nodes` are described in Rows.

    `keys` are those of a Selection. If `saves` is True as well, they are addresses of modules, and
    only the outputs of those modules stay after the pass.
    """

    saves: bool | frozenset[int] = True
    keys: frozenset[str] = frozenset()
    transform: Callable[[torch.Tensor], Any] | None = None
    keeps_args: bool = False
    keeps_gradients: bool = False
    max_nodes: int | None = None
    random_seed: int | None = None
    keeps_output: bool = False


# -- the model and its inputs


def check_model(model: Any) -> None:
    """Raises TypeError unless `model` is a supported model."""
    if not isinstance(model, torch.nn.Module | OtherModel):
        hint = ""
        if isinstance(model, type):
            hint = "Make an instance of it."
        elif isinstance(model, torch.Tensor):
            hint = "The model is the first argument."
        elif callable(model):
            hint = "Functions can be logged, drawn and validated; this is for modules alone."
            if is_for_jax(model):
                hint = (
                    "A JAX function can be logged, drawn and validated, but this function is for "
                    "PyTorch only."
                )
        raise TypeError(f"model must be a torch.nn.Module, got {got(model)}. {hint}".rstrip())


def check_inputs(
    model: Any, input_args: Any, input_kwargs: Any
) -> tuple[list[Any], dict[str, Any]]:
    """The model's positional and keyword arguments, after checking that its `forward` takes them.

    A tuple is one argument if `forward` takes only one, and several otherwise.
    """
    check_model(model)
    _check_kwargs(model, input_kwargs)
    if input_args is None:
        args = []
    elif isinstance(input_args, list | tuple) and not hasattr(input_args, "_fields"):
        args = list(input_args)
    else:
        args = [input_args]
    kwargs = dict(input_kwargs or {})
    if isinstance(model, OtherModel) or not model._forward_pre_hooks:
        args = _bound(model, args, kwargs, input_args)
    return args, kwargs


def _check_kwargs(model: torch.nn.Module, input_kwargs: Any) -> None:
    if input_kwargs is None or isinstance(input_kwargs, Mapping):
        return
    message = (
        "input_kwargs must be a dict of keyword arguments of the model, or None, got "
        f"{got(input_kwargs)}."
    )
    if isinstance(input_kwargs, str | bool):
        raise TypeError(
            f"{message} Give options by name, such as layers_to_save='all' or vis_opt='rolled'."
        )
    names = forward_names(model)[:2]
    several = ", ".join(names) if len(names) == 2 else "x, y"
    raise TypeError(
        f"{message} To give the model several arguments, make a list of them: [{several}]."
    )


def inputs_note(model: Any, input_args: Any, args: list[Any]) -> str | None:
    """A note to add to a model's exception if its inputs may be ambiguous, or None."""
    if len(args) != 1 or args[0] is not input_args:
        return None
    name = title_of(model)
    if isinstance(input_args, tuple):
        return (
            f"torchlens: {name} takes one argument, so the tuple in input_args was given to it as "
            "that argument."
        )
    if (
        isinstance(input_args, Mapping)
        and input_args
        and set(forward_names(model)) >= set(input_args)
    ):
        return (
            f"torchlens: the {type(input_args).__name__} in input_args was given to {name} as one "
            "argument. To give its items by name: input_kwargs=..."
        )
    return None


def positional_names(forward: Any) -> tuple[str, ...] | None:
    """The argument names of a method, or None if the method is not a plain one.

    A plain method has no *args, **kwargs or keyword-only arguments, and is not wrapped.
    """
    function = getattr(forward, "__func__", None)
    code = getattr(function, "__code__", None)
    if (
        code is None
        or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
        or code.co_kwonlyargcount
    ):
        return None
    if hasattr(function, "__wrapped__") or hasattr(function, "__signature__"):
        return None
    names: tuple[str, ...] = code.co_varnames[1 : code.co_argcount]
    return names


def forward_names(model: torch.nn.Module) -> list[str]:
    """The arguments that `forward` takes by name."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # a forward written in C, or a scripted one
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _bound(
    model: torch.nn.Module, args: list[Any], kwargs: dict[str, Any], input_args: Any
) -> list[Any]:
    """The positional arguments, bound to the signature of `forward`."""
    names = positional_names(model.forward)
    if names is not None and not kwargs:
        defaults = model.forward.__func__.__defaults__ or ()  # type: ignore[attr-defined]
        if len(names) - len(defaults) <= len(args) <= len(names):
            return args
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a forward written in C, or a scripted one
        return args
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        if isinstance(input_args, tuple) and len(args) > 1 and _takes_one(signature, kwargs):
            return [input_args]
        given = [type(arg).__name__ for arg in args] + [
            f"{name}={type(arg).__name__}" for name, arg in kwargs.items()
        ]
        raise TypeError(
            f"{title_of(model)}{signature} cannot be called with ({', '.join(given)}): {error}. "
            f"{_inputs_hint(signature, args)}"
        ) from None
    return args


def _takes_one(signature: inspect.Signature, kwargs: dict[str, Any]) -> bool:
    """True if exactly one positional argument is missing."""
    kinds = [(p.name, p.kind) for p in signature.parameters.values()]
    if any(kind is inspect.Parameter.VAR_POSITIONAL for _, kind in kinds):
        return False
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if sum(kind in by_position and name not in kwargs for name, kind in kinds) != 1:
        return False
    try:
        signature.bind(None, **kwargs)
    except TypeError:
        return False
    return True


def _inputs_hint(signature: inspect.Signature, args: list[Any]) -> str:
    if len(args) == 1 and isinstance(args[0], dict):
        keys = [key for key in args[0] if isinstance(key, str)]
        if keys and signature.parameters.keys() >= set(keys):
            return (
                "A dict as input_args is one argument. To give arguments by name: "
                "input_kwargs=that_dict."
            )
        return (
            "A dict as input_args is one argument. Give positional arguments as a list, named "
            "ones as input_kwargs={...}."
        )
    return (
        "input_args is one tensor or a list of positional arguments (if the only argument is a "
        "list: [the_list]), input_kwargs is a dict of keyword arguments."
    )


def named_inputs(
    model: torch.nn.Module, args: list[Any], kwargs: dict[str, Any]
) -> list[tuple[Path, torch.Tensor]]:
    """Input tensors, with the path from the argument that contains them."""
    names: Sequence[str] | None = positional_names(model.forward)
    rest = "args"
    if names is None:
        try:
            parameters = list(inspect.signature(model.forward).parameters.values())
        except (TypeError, ValueError):  # a forward written in C, or a scripted one
            parameters = []
        names = [
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), rest)
    found = []
    for position, argument in enumerate(args):
        head: Path = (names[position],) if position < len(names) else (rest, position - len(names))
        found += [((*head, *path), tensor) for path, tensor in named_tensors(argument)]
    for name, argument in kwargs.items():
        found += [((name, *path), tensor) for path, tensor in named_tensors(argument)]
    return found
