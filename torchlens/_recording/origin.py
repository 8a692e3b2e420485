"""Where a log comes from: digests of the weights and inputs, and the versions that ran."""

import platform
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_char
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np
import torch

from torchlens._recording.unseen import NoTorchFunction, unseen
from torchlens._recording.wrappers import local_value, why_valueless

_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Origin:
    """What the log of a model was made from; None where it is not known."""

    weights: str | None = None
    inputs: str | None = None
    versions: dict[str, str] = field(default_factory=dict)


class InputTensor(NamedTuple):
    """An input by its name, held weakly, with its version and the number of its entry."""

    name: str
    find: Callable[[], torch.Tensor | None]
    version: int
    entry: int


@dataclass(frozen=True, slots=True)
class LiveOrigin:
    """What a log was made from, before the digests are computed.

    `weights` are parameters and buffers with their versions; `data` are inputs that are no tensors,
    by name.
    """

    weight_names: Sequence[str] = ()
    weights: Sequence[torch.Tensor] = ()
    weight_versions: Sequence[int] = ()
    inputs: Sequence[InputTensor] = ()
    data: Sequence[tuple[str, Any]] = ()
    framework: str = "torch"

    def settled(self, saved_value: Callable[[int], torch.Tensor | None]) -> Origin:
        """The digests. A saved value stands for an input that was changed or freed since."""
        inputs = [*self.data, *((one.name, _input_value(one, saved_value)) for one in self.inputs)]
        return Origin(
            self._weights_digest(), digest(inputs) if inputs else None, versions_now(self.framework)
        )

    def _weights_digest(self) -> str | None:
        if not self.weights or list(map(version_of, self.weights)) != list(self.weight_versions):
            return None
        return digest(zip(self.weight_names, self.weights, strict=True))


def _input_value(
    given: InputTensor, saved_value: Callable[[int], torch.Tensor | None]
) -> torch.Tensor | None:
    value = given.find()
    if value is None or version_of(value) != given.version:
        return saved_value(given.entry)
    return value


def weights_digest(model: torch.nn.Module) -> str | None:
    """The digest of a model's parameters and buffers, as a log of the model has it."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return digest((name.replace("_orig_mod.", ""), tensor) for name, tensor in named)


def digest(named: Iterable[tuple[str, Any]]) -> str | None:
    """32 hexadecimal digits of SHA-256 over names, dtypes, shapes and bytes of tensors, arrays,
    numbers and text; None if one of them has no values.

    The order of the names does not matter, nor does the device.
    """
    whole = sha256()
    for name, value in sorted(named, key=lambda one: one[0]):
        whole.update(f"{name} ".encode(errors="backslashreplace"))
        if isinstance(value, torch.Tensor):
            if not _add_tensor(value, whole):
                return None
        elif not _add_data(value, whole):
            return None
    return whole.hexdigest()[:_DIGITS]


def _add_data(value: Any, whole: Any) -> bool:
    """Adds a number, text or array; False for anything else."""
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        kind, content = f"{value.dtype.str} {list(value.shape)}", value.tobytes()
    elif isinstance(value, str | bytes | int | float | complex):
        kind, content = type(value).__name__, repr(value).encode(errors="backslashreplace")
    else:
        return False
    whole.update(f"{kind} {len(content)}\n".encode())
    whole.update(content)
    return True


def _add_tensor(tensor: torch.Tensor, whole: Any) -> bool:
    """Adds a tensor; False if it has no values, or none in plain memory."""
    if why_valueless(tensor) is not None or isinstance(tensor, torch.nn.UninitializedParameter):
        return False
    with unseen(), NoTorchFunction():
        plain = local_value(tensor).detach()
        if plain.layout is not torch.strided or plain.is_nested or plain.is_quantized:
            return False
        plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
        size = plain.numel() * plain.element_size()
        if size > plain.untyped_storage().nbytes():  # FSDP frees the memory of parameters
            return False
        form = str(plain.dtype).removeprefix("torch.")
        whole.update(f"{form} {list(plain.shape)} {size}\n".encode())
        if size:
            # Not by `numpy()`: after that, the memory of a parameter cannot be resized.
            whole.update((c_char * size).from_address(plain.data_ptr()))
    return True


def version_of(tensor: torch.Tensor) -> int:
    """torch's version counter of the tensor; -1 if it has none."""
    try:
        return tensor._version
    except RuntimeError:  # tensors made under inference_mode
        return -1


def versions_now(framework: str = "torch") -> dict[str, str]:
    """The versions of torchlens, the frameworks and Python that run here."""
    found = {"torchlens": installed_version("torchlens"), "torch": torch.__version__}
    if framework != "torch":
        found[framework] = installed_version(framework)
    return found | {"python": platform.python_version()}


def installed_version(package: str) -> str:
    """The version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:  # run from its source, without having been installed
        return "(not installed)"
