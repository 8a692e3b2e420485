"""Collecting the gradient of each entry during a later backward pass.

A hook on the tensor of an entry hears the gradient with respect to the value it had then. Two cases need more. The
tensor of an in-place operation on a *view* is not on autograd's path: the base is (torch calls the node `CopySlices`), so
the gradient is cut out of the base's. And a leaf of the user's must not keep a hook of ours: it is heard at the node that
accumulates its gradient, which goes when the graph goes.
"""

from typing import Any

import torch

__all__ = ["GradientHooks"]


class GradientHooks:
    """Fills `gradients` (entry number → gradient, summed over backward passes through it) as backward runs.

    The hooks hold this dict alone, so that nothing they are attached to keeps a history alive.
    """

    def __init__(self) -> None:
        self.gradients: dict[int, torch.Tensor] = {}
        # Nodes of leaves, kept until the graph that is being built holds them.
        self._nodes: list[Any] = []
        # For each entry that is a view, the node that was heard: torch makes a new one when the base is written.
        self._view_nodes: dict[int, Any] = {}

    def watch(self, entry: int, tensor: torch.Tensor) -> None:
        """Hears the gradient of `tensor`, which entry `entry` made."""
        if not tensor.requires_grad:
            return
        add = _adder(self.gradients, entry)
        if tensor.grad_fn is not None:
            tensor.register_hook(add)
            if tensor._is_view():
                self._view_nodes[entry] = tensor.grad_fn
        else:
            node = torch.autograd.graph.get_gradient_edge(tensor).node
            node.register_prehook(lambda grads: add(grads[0]))
            self._nodes.append(node)

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
        add_after = _adder(self.gradients, entry)
        add_before = None if before is None or before < 0 else _adder(self.gradients, before)

        def cut(gradient: Any) -> torch.Tensor | None:
            if gradient is None:
                return None
            laid_out = gradient.new_empty_strided(base_size, base_stride).copy_(gradient)
            return laid_out.as_strided(size, stride, offset).clone()

        def hear_after(grads: tuple[Any, ...]) -> None:
            add_after(cut(grads[0]))

        def hear_before(grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> None:
            if add_before is not None:
                add_before(cut(grad_inputs[0]))

        base.grad_fn.register_prehook(hear_after)
        base.grad_fn.register_hook(hear_before)


def _adder(gradients: dict[int, torch.Tensor], entry: int) -> Any:
    def add(gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            known = gradients.get(entry)
            gradient = gradient.detach()
            # Cloned: autograd may go on to add into the very tensor it hands to hooks.
            gradients[entry] = gradient.clone() if known is None else known + gradient

    return add
