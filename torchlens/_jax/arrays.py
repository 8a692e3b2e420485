"""Converts arrays of JAX to torch tensors, and back.

A tensor shares the memory of its array if torch has the type. A random key becomes the numbers in
it; a type that torch lacks becomes the smallest that holds all its values (int4 → int8, float8_e3m4
→ float16).
"""

from functools import cache
from typing import Any

import jax
import ml_dtypes
import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

# numpy's name of a type → torch's type.
_SAME = {
    name: getattr(torch, name)
    for name in (
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16",
        "bfloat16", "float32",
        "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
}  # fmt: skip
_WIDER = {
    **({} if "float8_e8m0fnu" in _SAME else {"float8_e8m0fnu": torch.float32}),  # before torch 2.7
    "int2": torch.int8,
    "int4": torch.int8,
    "uint2": torch.uint8,
    "uint4": torch.uint8,
    "float8_e3m4": torch.float16,
    "float8_e4m3": torch.float16,
    "float8_e4m3b11fnuz": torch.float16,
    "float4_e2m1fn": torch.float16,
    "float0": torch.bool,  # the gradient of an integer
}
# Types that torch does not accept from numpy although it has them: passed as integers.
_AS_BYTES = {np.dtype(ml_dtypes.bfloat16): np.uint16} | {
    np.dtype(getattr(ml_dtypes, name)): np.uint8 for name in _SAME if name.startswith("float8")
}


def is_array(value: Any) -> bool:
    """True for an array with values: of JAX, random keys, and of NumPy, also a NumPy scalar."""
    return isinstance(value, np.ndarray | np.generic) or (
        isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    )


def with_jax_arrays(tree: Any) -> Any:
    """The arguments with NumPy arrays converted to JAX arrays."""
    if type(tree) in (list, tuple):
        return type(tree)(map(with_jax_arrays, tree))
    if type(tree) is dict:
        return {key: with_jax_arrays(item) for key, item in tree.items()}
    is_own = (
        type(tree) is np.ndarray
        and tree.dtype.kind not in "OSUMm"
        and tree.dtype != jax.dtypes.float0
    )
    return jax.numpy.array(tree) if is_own else tree


def is_key(value: Any) -> bool:
    """True for an array of typed random keys, `jax.random.key(0)`."""
    dtype = getattr(value, "dtype", None)
    return (
        dtype is not None
        and not isinstance(dtype, np.dtype)
        and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    )


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    name = "float0" if dtype == jax.dtypes.float0 else dtype.name
    known: torch.dtype | None = _SAME.get(name) or _WIDER.get(name)
    if known is None:
        raise TypeError(
            f"An array must have a dtype that a torch tensor can represent, got {dtype}."
        )
    return known


def shape_and_dtype(array: Any) -> tuple[torch.Size, torch.dtype]:
    """The shape and dtype of `to_torch(array)`."""
    if is_key(array):
        return torch.Size((*array.shape, *array.dtype._impl.key_shape)), torch.uint32
    return torch.Size(array.shape), _torch_dtype(array.dtype)


def to_torch(array: Any) -> torch.Tensor:
    """The array as a CPU tensor, without a copy if possible: do not write to it."""
    if is_key(array):
        array = jax.random.key_data(array)
    if isinstance(array, jax.Array) and _is_same(array.dtype) and _is_on_host(array):
        return from_dlpack(array.__dlpack__())  # three times as fast as torch.from_dlpack(array)
    host = np.asarray(array)
    if host.dtype == jax.dtypes.float0:
        return torch.zeros(host.shape, dtype=torch.bool)
    dtype, host = _torch_dtype(host.dtype), as_known_type(host)
    if not _is_plain_memory(host):
        host = np.array(host)
    if host.dtype in _AS_BYTES:
        return torch.from_numpy(host.view(_AS_BYTES[host.dtype])).view(dtype)
    if host.dtype.char in "qQ":  # numpy's `long long`, which torch does not accept
        host = host.view(f"{host.dtype.kind}8")
    return torch.from_numpy(host)


def _is_plain_memory(array: np.ndarray) -> bool:
    """True if torch can use the memory of an array as it is."""
    flags = array.flags
    return flags.writeable and flags.c_contiguous and min(array.strides, default=0) >= 0


def as_known_type(array: Any) -> Any:
    """The array, or tracer, with a random key or a type that torch lacks converted."""
    if is_key(array):
        return jax.random.key_data(array)
    wider = _WIDER.get(array.dtype.name) if array.dtype != jax.dtypes.float0 else None
    return array if wider is None else array.astype(str(wider).removeprefix("torch."))


@cache
def _is_same(dtype: np.dtype[Any]) -> bool:
    """True if torch has the type. Cached: `dtype.name` is slow."""
    return dtype.name in _SAME


def _is_on_host(array: Any) -> bool:
    """True if the array is on the CPU, in one piece."""
    devices = array.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


def to_jax(value: Any, dtype: Any) -> Any:
    """A tensor, array or number as an array of this type: the inverse of `to_torch`."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if plain.dtype is torch.bfloat16:
            value = plain.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        elif plain.dtype.itemsize == 1 and plain.dtype.is_floating_point:
            value = (
                plain.view(torch.uint8)
                .numpy()
                .view(getattr(ml_dtypes, str(plain.dtype).removeprefix("torch.")))
            )
        else:
            value = plain.numpy()
        value = np.array(value)  # JAX may keep it, and the tensor's owner may write to it
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return (
            value
            if is_key(value)
            else jax.random.wrap_key_data(np.asarray(value), impl=dtype._impl)
        )
    if dtype == jax.dtypes.float0:
        return np.zeros(np.shape(value), dtype)
    return jax.numpy.asarray(value, dtype)


def number_of(array: Any) -> Any:
    """The Python number in an array without dimensions; a random key unchanged."""
    if is_key(array):
        return array
    value = np.asarray(array)[()]
    return value.item() if value.dtype.kind in "biufc" else float(value)
