"""Edits in force while a block runs: in every call of the model that this thread makes.

Each call runs under a log that saves nothing (or under the user's own log), whose recorder
exchanges the results of the edited calls. What is no call, an input or a module that returns its
argument, is exchanged by hooks on the modules, which are removed at the end.
"""

from collections.abc import Callable
from functools import partial
from threading import get_ident
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from torchlens._capture.current import CURRENT, add_watcher, remove_watcher
from torchlens._capture.exchange import Change, Spot, changed_identity, changed_result
from torchlens._capture.options import CaptureOptions, named_inputs
from torchlens._capture.patches.patching import apply_module_patches, undo_patches
from torchlens._capture.recorder import Recorder
from torchlens._capture.session import Session
from torchlens._capture.threads import is_over
from torchlens._edit.changes import Edited
from torchlens._edit.plan import Target, pairs_of
from torchlens._history.sites import Place, Site, axes_of
from torchlens._recording.operations import IDENTITY
from torchlens._recording.origin import version_of
from torchlens._recording.trees import same_with
from torchlens._recording.unseen import NoTorchFunction
from torchlens._text.error_wording import did_you_mean
from torchlens.errors import EditError

Tensor = torch.Tensor
_Model = TypeVar("_Model", bound=torch.nn.Module)
_Result = TypeVar("_Result")


def _remove_hook(module: torch.nn.Module, hook: Any) -> None:
    """Removes a forward hook or pre-hook, if it is registered."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number in [number for number, own in hooks.items() if own is hook]:
            del hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)


class Editing(Generic[_Model]):
    """Edits of a model, in force inside a `with` block. `step` counts the model's calls from 0."""

    def __init__(self, model: _Model, targets: list[Target], edits: Any = None) -> None:
        """`edits` are those of modules that are known by their address alone."""
        self._model = model
        self.step = -1
        self.num_applied: dict[str, int] = {}
        self._thread = 0
        self._hooks: list[tuple[torch.nn.Module, Any]] = []
        self._at_spots: dict[Spot, list[Target]] = {}
        self._inputs = [target for target in targets if target.input_path is not None]
        self._identities: dict[str, None] = {}
        for target in targets:
            self.num_applied[_name(target.edited)] = 0
            spot = target.spot
            if spot.name == IDENTITY.name:
                self._identities[spot.address] = None
            if target.input_path is None:
                self._at_spots.setdefault(spot, []).append(target)
        self._modules = _of_modules(model, edits) if edits is not None else []
        for _, edited in self._modules:
            self.num_applied[_name(edited)] = 0

    @property
    def model(self) -> _Model:
        """The model that is edited."""
        return self._model

    # -- the block ---------------------------------------------------------------------------------

    def __enter__(self) -> _Model:
        if self._thread:
            raise EditError("These edits are in force already. Make others: torchlens.edit(...).")
        self._thread = get_ident()
        self.step = -1
        self.num_applied = dict.fromkeys(self.num_applied, 0)
        try:
            self._begin()
        except BaseException:
            self._end()
            raise
        return self.model

    def during(self, work: Callable[[], _Result]) -> _Result:
        """The result of `work`, with the edits in force."""
        try:
            self.__enter__()
            result = work()
        finally:
            try:
                self._end()
            finally:  # again, because an interrupt may cut the first call short
                self._end()
        self._check_applied()
        return result

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._end()
        finally:  # again, because an interrupt may cut the first call short
            self._end()
        if error is None:
            self._check_applied()

    def _begin(self) -> None:
        # Noted before they are registered, so that an interrupt between the two leaves none.
        begin_call = self._begin_call
        self._hooks.append((self.model, begin_call))
        self.model.register_forward_pre_hook(begin_call, prepend=True, with_kwargs=True)
        for address in self._identities:
            module = self.model.get_submodule(address)
            self._hooks.append((module, partial(self._leave_identity, address)))
        self._hooks += [(module, partial(self._leave, edited)) for module, edited in self._modules]
        for module, hook in self._hooks[1:]:
            module.register_forward_hook(hook)
        CURRENT.exchanges = (*CURRENT.exchanges, self)
        if self._at_spots:
            apply_module_patches(self)
            add_watcher(self)

    def _end(self) -> None:
        remove_watcher(self)
        undo_patches(self)
        CURRENT.exchanges = tuple(other for other in CURRENT.exchanges if other is not self)
        for module, hook in self._hooks:
            _remove_hook(module, hook)
        self._hooks.clear()
        self._thread = 0

    def _check_applied(self) -> None:
        never = [name for name, count in self.num_applied.items() if not count]
        if not never:
            return
        number = self.step + 1
        why = (
            f"In {number} call{'' if number == 1 else 's'} of the model, that operation did not "
            "run, or ran inside a call that the log records as one (a scripted function, vmap, a "
            "custom autograd function)"
        )
        if not number:
            why = "The model was not called in the block: call it as model(...)"
        raise EditError(f"These edits were never applied: {', '.join(never)}. {why}.")

    # -- results of calls --------------------------------------------------------------------------

    def change_at(self, spot: Spot) -> Change | None:
        """As in Exchange."""
        found = self._at_spots.get(spot)
        return None if found is None else partial(self._change, found)

    def _change(self, targets: list[Target], index: int, value: Tensor) -> Tensor | None:
        new = None
        for target in targets:
            if target.output_index == index:
                changed = self._edited(target.edited, value if new is None else new)
                new = new if changed is None else changed
        return new

    def _edited(self, edited: Edited, value: Tensor) -> Tensor | None:
        self.num_applied[_name(edited)] += 1
        try:
            return edited.value(value, self.step)
        except TypeError as error:  # torch hides a TypeError that an operator raises
            raise EditError(f"The edit of {_name(edited)} failed: {error}") from error

    # -- calls of the model ------------------------------------------------------------------------

    def begins_with(self, module: Any) -> bool:
        """As in Watcher: calls that no log records."""
        return module is self.model and (CURRENT.tracker is None or is_over(CURRENT.tracker))

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As in Watcher."""
        return Session(module, CaptureOptions(saves=False)).run(list(args), kwargs)

    def enter(self, *_: Any, **__: Any) -> None:
        """As in Watcher: nothing to watch."""

    end: Any = enter
    leave: Any = enter
    fail: Any = enter

    # -- hooks on modules --------------------------------------------------------------------------

    def _recorder(self) -> Recorder | None:
        tracker = CURRENT.tracker
        return None if tracker is None or is_over(tracker) else tracker.recorder

    def _begin_call(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Counts the call, and exchanges its inputs."""
        if get_ident() != self._thread:
            return None
        self.step += 1
        if not self._inputs:
            return None
        with NoTorchFunction():
            new = self._changed_inputs(args, kwargs)
        found: Any = same_with((args, kwargs), lambda tensor: new.get(id(tensor), tensor))
        return found

    def _changed_inputs(self, args: Any, kwargs: Any) -> dict[int, Tensor]:
        recorder = self._recorder()
        found: dict[int, Tensor] = {}
        given = dict(named_inputs(self.model, list(args), kwargs))
        for target in self._inputs:
            path = target.input_path
            assert path is not None
            if path not in given:
                raise EditError(f"{_name(target.edited)}: this call has no such input.")
            old = given[path]
            new = self._edited(target.edited, found.get(id(old), old))
            if new is not None:
                found[id(old)] = new
                if recorder is not None:
                    _note_input(recorder, old, new)
        return found

    def _leave_identity(self, address: str, module: Any, args: Any, result: Any) -> Any:
        """Exchanges what a module returns of its own arguments."""
        recorder = self._recorder()
        if get_ident() != self._thread or recorder is None:
            return None
        given = {id(tensor) for tensor in _tensors(args)}

        def changed(number: int, tensor: Tensor) -> Tensor | None:
            if id(tensor) not in given:
                return None
            changes = recorder.changes_of(IDENTITY)  # type: ignore[attr-defined]
            return changed_identity(recorder, next(iter(changes), None), tensor)

        with NoTorchFunction():
            recorder.complete()
            return changed_result(result, changed)

    def _leave(self, edited: Edited, module: Any, args: Any, result: Any) -> Any:
        """Exchanges the first tensor that a module returns."""
        if get_ident() != self._thread:
            return None

        def changed(number: int, tensor: Tensor) -> Tensor | None:
            if number:
                return None
            axes = axes_of(edited.place.site, tensor.shape)
            own = edited._replace(place=edited.place._replace(axes=axes))
            recorder = self._recorder()
            if recorder is None:
                return self._edited(own, tensor)
            return changed_identity(recorder, lambda _, value: self._edited(own, value), tensor)

        recorder = self._recorder()
        with NoTorchFunction():
            if recorder is not None:
                recorder.complete()
            return changed_result(result, changed)


def _name(edited: Edited) -> str:
    return str(edited.place.site)


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    same_with(tree, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def _note_input(recorder: Recorder, old: Tensor, new: Tensor) -> None:
    """Makes the edited input the value of its entry."""
    number = recorder.number_of(old)
    if number is not None and number >= 0:
        recorder.complete()
        recorder.stand_in(number, new)
        recorder.edited.add(number)
        if recorder.memory.values[number] is not None:
            recorder.memory.values[number] = new
            recorder.memory.versions[number] = version_of(new)


def _of_modules(model: torch.nn.Module, edits: Any) -> list[tuple[torch.nn.Module, Edited]]:
    """Edits of what modules return, without a history."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found = []
    for site, edit in pairs_of(edits):
        if site.head is not None or site.part not in (None, "after") or site.key not in modules:
            near = did_you_mean(site.key, [name for name in modules if name])
            raise KeyError(
                f"{site} is not the output of a module of {type(model).__name__}. {near}Without a "
                "history, edits name modules by their addresses. For operations, heads and what "
                "attentions read, log the model first: torchlens.edit(model, edits, history)."
            )
        edited = Edited(Place(-1, {}, site), edit, partial(_no_record, site))
        found.append((modules[site.key], edited))
    return found


def _no_record(site: Site) -> Tensor:
    raise EditError(
        f"The edit of {site} needs the recorded value: give a history, torchlens.edit(model, "
        "edits, history)."
    )
