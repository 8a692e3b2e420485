"""What a pickle or a deep copy of a log keeps beside its documents: live objects, tensors and
parameters. A file of a trace has no live objects.

A `StandIn` replaces what cannot be pickled (a lambda) and what cannot be read (an object whose
class is not known there).
"""

import copy
import pickle
from collections.abc import Iterable, Iterator, Mapping
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from torchlens._recording.functions import StandIn, found_again, reference_to
from torchlens._recording.unseen import NoTorchFunction, unseen
from torchlens._recording.wrappers import copy_of

FUNCTIONS = (
    FunctionType, BuiltinFunctionType, MethodDescriptorType, MethodWrapperType,
    WrapperDescriptorType, type,
    torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip
_ATOMS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LONGEST_TEXT = 1000
_SMALL = 1 << 20  # a tensor up to this many bytes is pickled together with others
_POOL = 1 << 26  # bytes


def text_of(value: Any) -> str:
    """The `repr` of a value, shortened."""
    try:
        text = repr(value)
    except Exception:  # the object's own `__repr__`
        text = object.__repr__(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


class LiveObject:
    """Pickles, and copies deeply, as its value, or as `instead` or a stand-in where it cannot. A
    function is pickled by name.
    """

    def __init__(self, value: Any, instead: Any = None, is_function: bool = False) -> None:
        self._value = value
        self._instead = instead
        self._is_function = is_function or isinstance(value, FUNCTIONS)

    def __reduce__(self) -> tuple[Any, ...]:
        value, instead = self._value, self._instead
        if self._is_function:
            return found_again, (reference_to(value),)
        text = text_of(value)
        if isinstance(value, torch.nn.Module):
            return _stand_in, (text, "models are left where they are.", instead)
        try:
            # A pickle inside the pickle, so that the rest can be read where this cannot.
            return _opened, (pickle.dumps(value, pickle.DEFAULT_PROTOCOL), text, instead)
        except Exception as error:  # the object's own code may raise anything
            why = f"it cannot be pickled ({type(error).__name__}: {error})."
            return _stand_in, (text, why, instead)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._is_function or isinstance(self._value, torch.nn.Module):
            return self._value
        try:
            return copy.deepcopy(self._value, memo)
        except Exception:  # as above; what cannot be copied is shared
            return self._value


def _opened(data: bytes, text: str, instead: Any) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:  # its class is not known here, or does not take it back
        why = f"it cannot be read back here ({type(error).__name__}: {error})."
        return _stand_in(text, why, instead)


def _stand_in(text: str, reason: str, instead: Any) -> Any:
    return StandIn(text, reason) if instead is None else instead


class LiveObjects:
    """Numbers the live objects of one log; `found` are they, each once."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # so that ids stay their own

    def keep(self, value: Any, is_function: bool = False) -> int:
        """The number of an object."""
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self.found)
            is_plain = isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject
            self.found.append(value if is_plain else LiveObject(value, None, is_function))
            self._kept.append(value)
        return number


def live_parameter(param: Parameter) -> Any:
    """A parameter is pickled itself, so that a history and its model, pickled together, still share
    it.
    """
    if isinstance(param, FakeTensor):  # a copy of its mode would free the mode's memory twice
        return Parameter(_without_values(param), param.requires_grad)
    if type(param).__module__.partition(".")[0] == "torch":
        if all(isinstance(value, _ATOMS) for value in vars(param).values()):
            return param
        if type(param) is Parameter:  # without the attributes that other code has set on it
            return Parameter(param.detach(), param.requires_grad)
    instead = Parameter(_without_values(param), param.requires_grad)
    return LiveObject(param, instead)


def _without_values(param: Parameter) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty(tuple(map(int, param.shape)), dtype=param.dtype, device="meta")


class TensorBundle:
    """Tensors by name. A pickle of many small ones takes long, so these are pickled as one."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __reduce__(self) -> tuple[Any, ...]:
        with unseen(), NoTorchFunction():
            own = {name: _alone(tensor) for name, tensor in self.tensors.items()}
            small = {n: t for n, t in own.items() if t.numel() * t.element_size() <= _SMALL}
            pools = list(map(_pool_of, _batches(small)))
        return _opened_bundle, ({n: t for n, t in own.items() if n not in small}, pools)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorBundle":
        with unseen(), NoTorchFunction():
            return TensorBundle({name: _copied(tensor) for name, tensor in self.tensors.items()})


def _copied(tensor: Tensor) -> Tensor:
    alone = _alone(tensor)
    is_same = alone.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    return copy_of(alone) if is_same else alone


def _alone(tensor: Tensor) -> Tensor:
    """The numbers of a tensor in the order of its shape, in memory that has nothing else."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    num_bytes = tensor.numel() * tensor.element_size()
    return tensor if tensor.untyped_storage().nbytes() == num_bytes else copy_of(tensor)


def _batches(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors in groups of one device and of bounded size."""
    batches: dict[torch.device, dict[str, Tensor]] = {}
    sizes: dict[torch.device, int] = {}
    for name, tensor in tensors.items():
        if sizes.get(tensor.device, 0) > _POOL:
            yield batches.pop(tensor.device)
            del sizes[tensor.device]
        batches.setdefault(tensor.device, {})[name] = tensor
        size = tensor.numel() * tensor.element_size()
        sizes[tensor.device] = sizes.get(tensor.device, 0) + size
    yield from batches.values()


_Facts = list[tuple[str, torch.dtype, tuple[int, ...]]]


def _pool_of(tensors: Mapping[str, Tensor]) -> tuple[Tensor, _Facts]:
    """The bytes of several tensors as one, and what they are."""
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    return torch.cat(flat), [(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]


def _opened_bundle(
    large: dict[str, Tensor], pools: Iterable[tuple[Tensor, _Facts]]
) -> TensorBundle:
    tensors = dict(large)
    for pool, facts in pools:
        start = 0
        for name, dtype, shape in facts:
            end = start + torch.Size(shape).numel() * dtype.itemsize
            tensors[name] = pool[start:end].clone().view(dtype).view(shape)
            start = end
    return TensorBundle(tensors)
