"""Runs recorded operations again, with other values.

`call_again` repeats one recorded call, from its own generator state and under its own modes.
`Replay` runs the operations of a whole history, each on the results of those before it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from torchlens._capture.patches.mode_stack import without_user_modes
from torchlens._recording.functions import StandIn
from torchlens._recording.interruptions import interrupts
from torchlens._recording.operations import BUFFER, IDENTITY, INPUT, OUTPUT, Kind
from torchlens._recording.recording import located
from torchlens._recording.trees import SLICE_BOUNDS, plain_tensors
from torchlens._recording.unseen import GradMode
from torchlens._replay.numbered_entries import Entries
from torchlens.errors import NotReplayableError

Tensor = torch.Tensor
# A replacement for an operation, called with its function, arguments and keyword arguments.
Instead = Callable[[Callable[..., Any], list[Any], dict[str, Any]], Any]
_SHORT = {torch.bfloat16, torch.float16}


# -- one call
# --------------------------------------------------------------------------------------------------


class Modes(NamedTuple):
    """The modes of torch that change what a call does.

    `autocast` has, by device type, whether it is on and its type; `dispatch` are the modes of the
    dispatcher. Modes of `__torch_function__` are not kept: they have acted before a call is
    recorded.
    """

    grad: bool
    inference: bool
    default_dtype: torch.dtype
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    dispatch: tuple[Any, ...] = ()


def current_modes() -> Modes:
    """The modes in force in this thread."""
    devices = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
    autocast = tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in devices
    )
    return Modes(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        autocast,
        tuple(_get_current_dispatch_mode_stack()),
    )


def autocast_of(dtypes: Set[torch.dtype]) -> Modes | None:
    """The present modes with autocast, if a call read or returned these types under it: floating
    types of two lengths. Else None.
    """
    short = dtypes & _SHORT
    if len(short) != 1 or not any(dtype.is_floating_point for dtype in dtypes - short):
        return None
    (dtype,) = short
    modes = current_modes()
    autocast = tuple((device, True, dtype) for device, _, _ in modes.autocast)
    return modes._replace(autocast=autocast)


@contextmanager
def in_force(modes: Modes) -> Iterator[None]:
    """A context in which these modes are in force."""
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(without_user_modes())
        stack.enter_context(torch._C._EnableTorchFunction())
        stack.enter_context(GradMode(modes.grad, modes.inference))
        for device, is_enabled, dtype in modes.autocast:
            if is_enabled or torch.is_autocast_enabled(device):
                # Without its cache of casts: each call is independent of the others.
                stack.enter_context(torch.autocast(device, dtype, is_enabled, cache_enabled=False))
        for mode in modes.dispatch:
            _push_mode(mode)
            stack.callback(_pop_mode)
        if modes.default_dtype is not before:
            stack.callback(torch.set_default_dtype, before)
            torch.set_default_dtype(modes.default_dtype)
        yield


def call_again(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    written: Sequence[int] = (),
    modes: Modes | None = None,
    generators: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Repeats a recorded call and returns the tensors of its result, or, if it returns none, those
    that it wrote to.

    `written` are the positions of the arguments that it writes to, `modes` the modes that it ran
    under (None: the present ones), and `generators` the initial states of the generators: the
    CPU's, then one for each GPU.
    """
    set_generators(generators)
    if isinstance(func, type) and issubclass(func, torch.autograd.Function):
        func = func.apply
    with nullcontext() if modes is None else in_force(modes):
        result = func(*args, **kwargs)
    changed = [kwargs.get("out"), *(args[place] for place in written if place < len(args))]
    return _tensors_in(result) or _tensors_in(changed)


def set_generators(states: Sequence[Tensor]) -> None:
    """Sets torch's generators: the CPU's, then one for each GPU."""
    for state in states[:1]:
        torch.set_rng_state(state)
    if len(states) > 1:
        torch.cuda.set_rng_state_all(list(states[1:]))


def _tensors_in(tree: Any) -> list[Tensor]:
    return [tensor for _, tensor in plain_tensors(tree)]


# -- a whole history
# --------------------------------------------------------------------------------------------------


class Replay:
    """Runs the operations of a history again, with some values replaced.

    Operations run in the recorded order, on memory of their own, so that views and writes in place
    have the same effects. `pinned` has the entries that cannot run again (random numbers, a
    function or an argument that was not saved), with reasons; they keep their saved values.

    >>> values = Replay(Entries(log)).run(lambda entry, value: 2 * value if entry == 3 else None)
    """

    def __init__(self, entries: Entries) -> None:
        self.entries = entries
        self.pinned: dict[int, str] = {}
        self._recording = entries.log.recording
        self._has_writes = bool(self._recording.writes)

    @property
    def is_live(self) -> bool:
        """True if there are functions to run again, and weights to run them with."""
        rows = [row for entry, row in enumerate(self.entries.rows)
                if self.entries.is_operation(entry)]  # fmt: skip
        has_functions = not all(isinstance(row.operation.func, StandIn) for row in rows)
        return has_functions and not any(param.is_meta for param in self._recording.params)

    def run(
        self,
        replace: Callable[[int, Tensor], Tensor | None] | None = None,
        dtype: torch.dtype | None = None,
    ) -> dict[int, Tensor | None]:
        """The values of all entries. `replace` is called with each entry and its value, and may
        return another value to continue with. With a `dtype`, inputs, weights and saved values are
        cast.
        """
        live: dict[int, Tensor] = {}
        values: dict[int, Tensor | None] = {}
        params = enumerate(() if dtype is None else self._recording.params)
        weights = {number: _cast(param.detach(), dtype) for number, param in params}
        with GradMode(False), kept_generator():
            for entry in range(self.entries.size):
                result = self._result(entry, live, weights, dtype)
                if result is None:
                    values[entry] = None
                    continue
                other = replace(entry, result) if replace is not None else None
                if other is not None:
                    result = _replaced(result, other, self._owns_memory(entry, result, live))
                live[entry] = result
                values[entry] = result.clone() if self._has_writes else result
        return values

    def part(
        self,
        entries: Iterable[int],
        given: dict[int, Tensor],
        weights: dict[int, Tensor] | None = None,
        instead: dict[int, Instead] | None = None,
    ) -> Tensor:
        """The value of the last of `entries` if only these run again, on the values `given`.

        `instead` has the functions that replace those of entries.
        """
        entries = sorted(set(entries) - given.keys())
        live = {entry: value.detach() for entry, value in given.items()}
        if any(self.entries.rows[entry].operation.written for entry in entries):
            live = {entry: value.clone() for entry, value in live.items()}
        result: Tensor | None = None
        with GradMode(False), kept_generator():
            for entry in entries:
                if entry in self.pinned:
                    raise NotReplayableError(self.pinned[entry])
                result = self._again(entry, live, weights or {}, (instead or {}).get(entry))
                live[entry] = result
        if result is None:
            raise NotReplayableError("nothing to run")
        return result

    # -- one entry
    # ---------------------------------------------------------------------------------------------

    def _result(
        self,
        entry: int,
        live: dict[int, Tensor],
        weights: dict[int, Tensor],
        dtype: torch.dtype | None,
    ) -> Tensor | None:
        """The result of running an entry again, or else its saved value in `dtype`."""
        is_given = self.entries.rows[entry].operation in (INPUT, BUFFER)
        if not is_given and entry not in self.pinned:
            try:
                if self.entries.is_random(entry):
                    raise NotReplayableError("it draws random numbers")
                return self._again(entry, live, weights)
            except NotReplayableError as reason:
                self.pinned[entry] = str(reason)
        saved = self._saved(entry)
        return None if saved is None else _cast(saved, dtype)

    def _saved(self, entry: int) -> Tensor | None:
        """A copy of the saved value."""
        saved = self.entries.raw(entry)
        return saved.detach().clone() if isinstance(saved, Tensor) else None

    def _again(
        self,
        entry: int,
        live: dict[int, Tensor],
        weights: dict[int, Tensor],
        instead: Instead | None = None,
    ) -> Tensor:
        row = self.entries.rows[entry]
        operation = row.operation
        if operation in (INPUT, BUFFER):
            saved = self._saved(entry)
            if saved is None:
                raise NotReplayableError("its value was not saved")
            return saved
        tensors = self._tensors(entry, live, weights)
        if operation in (OUTPUT, IDENTITY):
            return next(iter(tensors.values()))
        found = self._called(entry, tensors, instead)
        index = 0 if instead is not None and len(found) == 1 else row.output_index or 0
        if index >= len(found):
            raise NotReplayableError("it gave no tensor")
        return found[index].detach()

    def _called(
        self, entry: int, tensors: dict[Any, Tensor], instead: Instead | None
    ) -> list[Tensor]:
        """The results of an entry's function, or of `instead`, with these tensors as arguments."""
        row = self.entries.rows[entry]
        func = row.operation.func
        if isinstance(func, StandIn):
            raise NotReplayableError("its function was not stored")
        if row.operation.kind is Kind.COLLECTIVE:
            raise NotReplayableError("other processes took part in it")
        number = self.entries.graph.recorded[entry]
        kept = self._recording.saved_args.get(number, (row.args, row.kwargs))
        args, kwargs = filled(kept[0], kept[1], tensors)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            assert instead is not None
            return instead(func, list(args), kwargs)

        try:
            run = func if instead is None else replaced
            return call_again(run, args, kwargs, row.operation.written, self._modes(entry))
        except Exception as error:  # the operation may raise anything, given other values
            if interrupts(error):
                raise
            message = str(error).strip().partition("\n")[0]
            raise NotReplayableError(f"{type(error).__name__}: {message}") from error

    def _tensors(
        self, entry: int, live: dict[int, Tensor], weights: dict[int, Tensor]
    ) -> dict[Any, Tensor]:
        """The tensors among the arguments, by location; without those in saved arguments."""
        row = self.entries.rows[entry]
        found: dict[Any, Tensor] = {}
        for location, number in located(row.references):
            if number >= 0:
                tensor = live.get(self.entries.graph.entry_of.get(number, -1))
                if tensor is None:
                    raise NotReplayableError("one of its arguments is not in the history")
                found[location] = tensor
            elif (weight := self._weight(entry, -1 - number, weights)) is not None:
                found[location] = weight.clone() if row.operation.written else weight
        if row.operation.written and row.output_index:
            # The results of one call that writes have one entry each, and run one by one here.
            found = {location: tensor.clone() for location, tensor in found.items()}
        return found

    def _weight(self, entry: int, number: int, weights: dict[int, Tensor]) -> Tensor | None:
        """A parameter that an entry reads; None for a tensor of unknown origin that is among the
        saved arguments.
        """
        if number < len(self._recording.params):
            return weights.get(number, self._recording.params[number]).detach()
        if self.entries.graph.recorded[entry] in self._recording.saved_args:
            return None
        raise NotReplayableError(
            "it reads a tensor that the history does not hold; log with save_function_args=True"
        )

    def _modes(self, entry: int) -> Modes | None:
        """The modes that an entry ran under: autocast if the entry reads or returns floating types
        of two lengths, else the present ones (None).
        """
        entries, params = self.entries, self._recording.params
        dtypes = {entries.rows[near].dtype for near in (entry, *entries.parents[entry])}
        dtypes |= {params[number].dtype for number in entries.graph.params[entry]}
        return autocast_of(dtypes)

    def _owns_memory(self, entry: int, result: Tensor, live: dict[int, Tensor]) -> bool:
        """True if the result shares no memory with its parents, or is what was written."""
        if self.entries.rows[entry].operation.written:
            return True
        parents = [live[parent] for parent in self.entries.parents[entry] if parent in live]
        return all(
            parent.untyped_storage().data_ptr() != result.untyped_storage().data_ptr()
            for parent in parents
        )


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def _replaced(result: Tensor, other: Tensor, owns_memory: bool) -> Tensor:
    """`other` in place of `result`: in its memory, which views may share, or as a new tensor."""
    other = other.to(result.dtype) if result.dtype.is_floating_point else other
    if owns_memory and result.shape == other.shape and 0 not in result.stride():
        return result.copy_(other)
    return other.clone()


def filled(args: Any, kwargs: Any, places: dict[Any, Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with the tensors put back, by location."""
    own, named = list(args), dict(kwargs or {})
    for location, tensor in places.items():
        key, *rest = location if isinstance(location, tuple) else (location,)
        if isinstance(key, int):
            own[key] = _placed(own[key], rest, tensor)
        else:
            named[key] = _placed(named.get(key), rest, tensor)
    return own, named


def _placed(tree: Any, path: Sequence[Any], tensor: Tensor) -> Any:
    """`tree` with a tensor at a path."""
    if not path:
        return tensor
    key, *rest = path
    if isinstance(tree, slice):
        bounds = {name: getattr(tree, name) for name in SLICE_BOUNDS}
        return slice(*{**bounds, key: _placed(bounds[key], rest, tensor)}.values())
    if isinstance(tree, dict):
        return {**tree, key: _placed(tree[key], rest, tensor)}
    items = list(tree)
    items[key] = _placed(items[key], rest, tensor)
    return tuple(items) if isinstance(tree, tuple) else items


@contextmanager
def kept_generator() -> Iterator[None]:
    """Restores torch's random generator afterwards."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
