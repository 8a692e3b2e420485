"""Collecting the gradient of each entry during a later backward pass.

A hook on the tensor of an entry hears the gradient with respect to the value it had then. Three cases need more. The
tensor of an in-place operation on a *view* is not on autograd's path: the base is (torch calls the node `CopySlices`), so
the gradient is cut out of the base's. A view is given a new node when its base is written, and is heard again there. And
the model's inputs belong to the user: they may be part of other graphs and must not keep a hook of ours, so what arrives at
them is heard at the nodes of this pass that send it.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["GradientHooks", "Gradients"]

Hear = Callable[[Any], None]


class Gradients(dict[int, torch.Tensor]):
    """Entry number → gradient, summed over the backward passes through it.

    The hooks, which live as long as the graph does, know it only weakly: it is gone when its history is.
    """

    def hearer(self, entry: int) -> Hear:
        """A function that takes gradients of `entry`."""
        reference = weakref.ref(self)

        def hear(gradient: torch.Tensor | None) -> None:
            gradients = reference()
            if gradients is not None and gradient is not None:
                known = gradients.get(entry)
                # Cloned: autograd may go on to add into the very tensor it hands to hooks.
                gradients[entry] = gradient.detach().clone() if known is None else known + gradient.detach()

        return hear


class GradientHooks:
    """Fills `gradients` as backward runs."""

    def __init__(self) -> None:
        self.gradients = Gradients()
        # The end of the graph that each input hangs on, as (id of node, output), and the entries there.
        self._inputs: dict[tuple[int, int], list[int]] = {}
        # id of an input that is a leaf → the node that accumulates its gradient.
        self._leaves: dict[int, Any] = {}
        # Nodes seen, kept until the pass ends so that their ids stay theirs.
        self._nodes: dict[int, Any] = {}
        # For each entry that is a view, the node that was heard.
        self._view_nodes: dict[int, Any] = {}

    def watch_input(self, entry: int, tensor: torch.Tensor) -> None:
        """Hears what arrives at a tensor that existed before the pass."""
        if not tensor.requires_grad:
            return
        node, output = tensor.grad_fn, tensor.output_nr
        if node is None:
            with torch.enable_grad():  # a leaf tells the node that accumulates its gradient only to a reader
                node = tensor.view_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            self._leaves[id(tensor)] = node
        self._nodes[id(node)] = node
        self._inputs.setdefault((id(node), output), []).append(entry)

    def watch(self, entry: int, tensor: torch.Tensor) -> None:
        """Hears the gradient of `tensor`, which entry `entry` made."""
        if not tensor.requires_grad:
            return
        node = self._leaves.get(id(tensor)) if tensor.grad_fn is None else tensor.grad_fn
        at_input = self._inputs.get((id(node), tensor.output_nr))
        if at_input is not None:  # an input, handed on as it was
            at_input.append(entry)
            return
        if tensor.grad_fn is None:
            return
        tensor.register_hook(self.gradients.hearer(entry))
        if tensor._is_view():
            self._view_nodes[entry] = tensor.grad_fn
        self._watch_nodes(tensor.grad_fn)

    def watch_again(self, entry: int, tensor: torch.Tensor) -> None:
        """Before a view is read: hears it where it now stands, if its base was written since."""
        node = self._view_nodes.get(entry)
        if node is not None and tensor.grad_fn is not node:
            self.watch(entry, tensor)

    def watch_write(self, entry: int, tensor: torch.Tensor, before: int | None) -> None:
        """Hears the gradients of a view that entry `entry` wrote in place, and of what it was (`before`) until then."""
        base = tensor._base
        if base is None or base.grad_fn is None or type(base.grad_fn).__name__ != "CopySlices":
            return
        size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset() - base.storage_offset()
        base_size, base_stride = base.size(), base.stride()
        hear_after = self.gradients.hearer(entry)
        hear_before = None if before is None or before < 0 else self.gradients.hearer(before)

        def cut(gradient: Any) -> torch.Tensor | None:
            if gradient is None:
                return None
            laid_out = gradient.new_empty_strided(base_size, base_stride).copy_(gradient)
            return laid_out.as_strided(size, stride, offset)

        def after(grads: tuple[Any, ...]) -> None:
            hear_after(cut(grads[0]))

        def until_then(grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> None:
            if hear_before is not None:
                hear_before(cut(grad_inputs[0]))

        base.grad_fn.register_prehook(after)
        base.grad_fn.register_hook(until_then)
        self._watch_nodes(base.grad_fn)

    def _watch_nodes(self, node: Any) -> None:
        """Hears what the nodes of this pass, from `node` on, send to the inputs; each is visited once."""
        pending = [node] if self._inputs else []
        while pending:
            node = pending.pop()
            if id(node) in self._nodes:
                continue
            self._nodes[id(node)] = node
            for position, (below, output) in enumerate(node.next_functions):
                entries = None if below is None else self._inputs.get((id(below), output))
                if entries is not None:
                    hearers = _Hearers(self.gradients, entries, position)
                    node.register_hook(hearers)
                elif below is not None:
                    pending.append(below)


class _Hearers:
    """Takes what a node sends to an input, for the input and for the entries that hand it on."""

    def __init__(self, gradients: Gradients, entries: list[int], position: int) -> None:
        self._gradients = weakref.ref(gradients)
        self._entries = entries
        self._position = position

    def __call__(self, grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> None:
        gradients = self._gradients()
        if gradients is not None:
            for entry in self._entries:
                gradients.hearer(entry)(grad_inputs[self._position])
