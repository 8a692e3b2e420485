"""Samples tensors in the training thread, and their gradients during the backward pass."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchlens._capture.gradients.backward_hooks import node_of
from torchlens._monitor.films.tracks import Films
from torchlens._monitor.record.samples import PLAIN_TYPES, Sample, Sampler
from torchlens._monitor.record.series import SeriesNames
from torchlens._monitor.record.statistics import Observation
from torchlens._recording.unseen import call_unseen, is_seen
from torchlens._text.problems import Problems

# The number of tensors whose samples are cached: the same tensor is often the output of a module
# and of its parent, and the input of the next.
_MOST_SEEN = 16
_MOST_PENDING = 4_000
# torch overflows its stack when it frees a chain of tens of thousands of autograd nodes that have
# Python objects.
_MOST_HOOKS = 5_000
# Python's weak references expire with the Python object, which the C++ tensor may outlive.
_reference_to: Any = torch._C._WeakTensorRef  # type: ignore[attr-defined]
_Tensor = torch.Tensor


@dataclass(slots=True, eq=False)
class _Seen:
    """The cached sample of a tensor, at a version of it."""

    reference: Any  # to the tensor, weak
    version: int
    sample: Sample
    hook: "GradientHook | None" = None

    def is_of(self, version: int) -> bool:
        """Whether the tensor lives, and has not changed."""
        return self.version == version >= 0 and not self.reference.expired()


class Collector:
    """Collects observations until `take_all`. Callers record nothing while `is_armed` is False."""

    def __init__(self, names: SeriesNames, problems: Problems) -> None:
        self.names = names
        self.problems = problems
        self.pending: list[Observation] = []
        self.films: Films | None = None  # once `run.video` or `run.embed` was called
        self.is_armed = False
        self.sampler = Sampler()
        # Called when too many observations are pending to wait for the end of the step.
        self.on_full: Callable[[], None] | None = None
        self._seen: dict[int, _Seen] = {}
        self._hooks: list[weakref.ref[GradientHook]] = []
        self._self = weakref.ref(self)

    def take_all(self) -> list[Observation]:
        """Returns the pending observations and clears them."""
        found, self.pending = self.pending, []
        return found

    def check_size(self) -> None:
        """Calls `on_full` if too many observations are pending. Call it regularly."""
        if len(self.pending) > _MOST_PENDING and self.on_full is not None:
            self.on_full()

    def note(self, module: str, kind: str, name: str, tensor: _Tensor) -> int:
        """Samples a tensor for a series and returns the number of the series; -1 if the tensor
        cannot be sampled. Call it under `call_unseen`.
        """
        sample = self._sample_of(tensor)
        if sample is None:
            return -1
        number = self.names.number(module, kind, name, tensor)
        self.pending.append((number, sample, None))
        return number

    def _sample_of(self, tensor: _Tensor) -> Sample | None:
        """The sample of a tensor, from the cache if the tensor has not changed."""
        seen = self._seen.get(id(tensor))
        version = -1 if tensor.is_inference() else tensor._version
        if seen is not None and seen.is_of(version):
            return seen.sample
        sample = self.sampler.take(tensor)
        if sample is not None:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen[id(tensor)] = _Seen(_reference_to(tensor), version, sample)
        return sample

    def follow_gradient(self, module: str, name: str, tensor: _Tensor) -> None:
        """Registers a hook that samples the gradient of a tensor in the backward pass.

        The hook is on the tensor's current autograd node, not on the tensor: later in-place
        operations on the tensor create other nodes.
        """
        if not tensor.requires_grad or len(self._hooks) >= _MOST_HOOKS:
            return
        seen = self._seen.get(id(tensor))
        if seen is not None and seen.hook is not None and seen.is_of(tensor._version):
            seen.hook.series.append((module, name))
        elif (node := node_of(tensor)) is not None:
            hook = GradientHook(self._self, tensor.output_nr, [(module, name)])
            hook.handle = node.register_prehook(hook)
            self._hooks.append(weakref.ref(hook))
            if seen is not None:
                seen.hook = hook

    def on_gradient(self, hook: "GradientHook", gradient: _Tensor) -> None:
        """Samples a gradient, called by its hook. Call it under `call_unseen`."""
        if self.films is not None:
            for module, _ in hook.series:
                self.films.capture(self.films.gradients, module, gradient)
        sample = self.sampler.take(gradient)
        if sample is not None:
            for module, name in hook.series:
                number = self.names.number(module, "gradients", name, gradient)
                self.pending.append((number, sample, None))

    def forget(self) -> None:
        """Clears the cached samples and the expired hooks, between steps."""
        self._seen.clear()
        self._hooks = [each for each in self._hooks if each() is not None]

    def remove_hooks(self) -> None:
        """Removes all hooks from autograd graphs and disarms. Calling it again does nothing."""
        self.is_armed = False
        self._seen.clear()
        for reference in self._hooks:
            hook = reference()
            if hook is not None and hook.handle is not None:
                hook.handle.remove()
        self._hooks.clear()


@dataclass(slots=True, eq=False, weakref_slot=True)
class GradientHook:
    """A pre-hook on an autograd node. Its reference to the collector is weak: a graph must not keep
    the collector alive.
    """

    collector: "weakref.ref[Collector]"
    output: int  # of the node
    series: list[tuple[str, str]]  # module and name
    handle: Any = None

    def __call__(self, gradients: tuple[Any, ...]) -> None:
        collector, gradient = self.collector(), gradients[self.output]
        if collector is None or gradient is None or not collector.is_armed:
            return
        try:
            if type(gradient) in PLAIN_TYPES and not is_seen():
                collector.on_gradient(self, gradient)
            else:
                call_unseen(collector.on_gradient, self, gradient)
        except Exception as error:  # must not break the backward pass
            collector.problems.add_failure(error, "A gradient was not recorded")
