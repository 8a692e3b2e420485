"""Records every primitive that runs: one row for each array that it makes."""

import sys
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch

from torchlens._jax.arrays import is_array, number_of, shape_and_dtype, to_torch
from torchlens._jax.internals import concrete, current_context, scopes_of
from torchlens._jax.primitives import compiled_once, operation_of
from torchlens._jax.programs import INLINED
from torchlens._jax.user_lines import Place, Places
from torchlens._recording.operations import BUFFER, OUTPUT, Operation
from torchlens._recording.recording import Failure, ModuleCall, Row, make_row


class _Current(threading.local):
    """The recorder of the log that this thread makes, if it makes one."""

    recorder: "Recorder | None" = None
    tracker: Any = None  # of its modules


CURRENT = _Current()


class Recorder:
    """What is known of the arrays of a pass, by the id of each; whatever has an entry is kept alive
    until the end.

    `saves` says which entries keep their value: True, False, or their numbers. What makes a
    constant of a constant (`1e-5` as an array, that array as float32) is no entry: the constant is
    an argument of the operation that it goes into, as in a jaxpr. A conversion to the type or shape
    that the array has already, of which a jaxpr is silent, is none either.
    """

    def __init__(
        self,
        saves: bool | frozenset[int],
        keeps_args: bool,
        transform: Callable[[torch.Tensor], Any] | None,
    ) -> None:
        self.rows: list[Row] = []
        self.values: list[Any] = []
        self.saved_args: dict[int, tuple[Any, Any]] = {}
        self.module_calls = [ModuleCall("", 1, 0, None, 0)]
        self.booleans: dict[int, bool] = {}
        self.reads: set[int] = set()
        self.constants: list[tuple[str, int]] = []  # address and entry of arrays from elsewhere
        self.failure: Failure | None = None
        self.num_seen = 0
        self.places = Places()
        self.call_of_scope: dict[str, int] = {}
        self.names: dict[
            int, str
        ] = {}  # of arrays that are no entries until an operation reads them, by id
        self.running = 0  # the innermost module call
        self._saves = saves
        self._keeps_args = keeps_args
        self._transform = transform
        self._entry_of_id: dict[int, int] = {}
        self._numbers: dict[int, Any] = {}  # constants without dimensions, by id
        self._alive: list[Any] = []
        self._is_busy = False
        self._scopes: tuple[Any, ...] | None = None
        self._scope_call = 0
        self.is_backward = False

    # -- what no primitive made
    # ------------------------------------------------------------------------------------

    def know(self, array: Any, number: int) -> None:
        """From now on `array` is this entry, or this parameter (`-1 - k`)."""
        self._entry_of_id[id(array)] = number
        self._alive.append(array)

    def number_of(self, array: Any) -> int | None:
        return self._entry_of_id.get(id(array))

    def add_source(self, operation: Operation, array: Any) -> int:
        entry = self._add_boundary(operation, array, ())
        self.know(array, entry)
        return entry

    def add_output(self, array: Any) -> int:
        number = self.find(array)
        return self._add_boundary(OUTPUT, array, () if number is None else (number,))

    def _add_boundary(self, operation: Operation, array: Any, references: tuple[int, ...]) -> int:
        entry = len(self.rows)
        shape, dtype = shape_and_dtype(array)
        self.rows.append(
            Row(operation, (), None, references, 0, None, 0, 0.0, None, shape, dtype, None)
        )
        self.values.append(array if self._is_saved(entry) else None)
        return entry

    def _is_saved(self, entry: int) -> bool:
        return self._saves if isinstance(self._saves, bool) else entry in self._saves

    def find(self, value: Any) -> int | None:
        """The entry or parameter of an array (behind its tracers); an unknown array becomes a
        buffer.
        """
        array = concrete(value)
        number = self._entry_of_id.get(id(array))
        if number is None and isinstance(array, np.ndarray) and array.base is not None:
            number = self._entry_of_id.get(id(array.base))  # JAX's own view of numpy's array
        if number is None and is_array(array) and array.ndim and id(array) not in self._numbers:
            number = self._meet(array)
        return number

    def _meet(self, array: Any) -> int:
        """An array from somewhere else: a global variable, a constant in the code."""
        source = (
            array.base
            if isinstance(array, np.ndarray) and isinstance(array.base, np.ndarray)
            else array
        )
        name = self.names.get(id(source)) or f"constant_{len(self.constants) + 1}"
        entry = self.add_source(BUFFER, source)
        if source is not array:
            self.know(array, entry)
        self.constants.append((name, entry))
        return entry

    # -- what primitives make
    # --------------------------------------------------------------------------------------

    def process(
        self,
        original: Callable[..., Any],
        trace: Any,
        primitive: Any,
        args: Any,
        params: dict[str, Any],
    ) -> Any:
        """Runs a primitive, as JAX's own `process_primitive` does, and writes down what it made."""
        if self._is_busy:
            return original(trace, primitive, args, params)
        inlined = INLINED.get(primitive)
        if inlined is not None:
            return inlined(args, params)
        self.num_seen += 1
        self._is_busy = True
        try:
            start = perf_counter()
            result = original(trace, primitive, args, compiled_once(primitive, params))
            seconds = perf_counter() - start
            if not self._is_constant(primitive, args, result) and not self._is_same(
                primitive, args, result
            ):
                self._write_down(primitive, args, params, result, seconds)
            return result
        except BaseException as error:
            self._fail(error, primitive, args)
            raise
        finally:
            self._is_busy = False

    def _is_same(self, primitive: Any, args: Any, result: Any) -> bool:
        """Whether it is an identity in all but name: the array is the same entry as before."""
        if (
            primitive.name not in _SAME_ARRAY
            or args[0].dtype != result.dtype
            or np.shape(args[0]) != result.shape
        ):
            return False
        number = self.find(args[0])
        if number is None:
            return False
        self.know(result, number)
        return True

    def _is_constant(self, primitive: Any, args: Any, result: Any) -> bool:
        """Whether it only turned one number into an array, or such an array into another."""
        if primitive.name not in _MAKES_CONSTANT:
            return False
        result = result[0] if primitive.multiple_results else result
        if result.shape or len(args) > 1:
            return False
        source = args[0]
        if id(source) in self._entry_of_id or not (
            id(source) in self._numbers or not _is_device_array(source)
        ):
            return False
        self._numbers[id(result)] = number_of(result)
        self._alive.append(result)
        return True

    def _write_down(
        self, primitive: Any, args: Any, params: dict[str, Any], result: Any, seconds: float
    ) -> None:
        context = current_context()
        if context.traceback is None:
            code, instruction = self.places.here(sys._getframe(2))
        else:
            code, instruction = self.places.traced(context.traceback)
        entry_of_id, rows, saves = self._entry_of_id, self.rows, self._saves
        references, rest, dtypes = [], [], []
        for arg in args:
            number = entry_of_id.get(id(arg))
            if number is None:
                number = self.find(arg)
            references.append(number)
            rest.append(None if number is not None else self._constant(arg))
            dtypes.append(getattr(arg, "dtype", None))
        call = self.module_call_of(context)
        operation = operation_of(primitive, tuple(dtypes), self.is_backward)
        head = (operation, tuple(rest), params, tuple(references), call, code, instruction, seconds)
        results = result if primitive.multiple_results else (result,)
        is_one = len(results) == 1
        for index, array in enumerate(results):
            if not is_array(array):
                continue
            entry = len(rows)
            rows.append(make_row((*head, None if is_one else index, *shape_and_dtype(array), None)))
            is_saved = saves if saves is True or saves is False else entry in saves
            self.values.append(array if is_saved else None)
            entry_of_id[id(array)] = entry
            self._alive.append(array)
            if self._keeps_args and is_saved:
                self.saved_args[entry] = (args, params)

    def _constant(self, arg: Any) -> Any:
        number = self._numbers.get(id(arg))
        if number is None and is_array(arg) and not arg.ndim:
            return number_of(arg)
        return arg if number is None else number

    def module_call_of(self, context: Any) -> int:
        """The module call that an operation was written in, which may be over, as where its
        gradient is computed.
        """
        scopes = scopes_of(context)
        if scopes is not self._scopes:
            self._scopes = scopes
            self._scope_call = -1
            self.is_backward = any(scope.name == "transpose" for scope in scopes)
            for scope in reversed(scopes):
                call = self.call_of_scope.get(scope.name)
                if call is not None:
                    self._scope_call = call
                    break
        return self._scope_call if self._scope_call >= 0 else self.running

    # -- what is told of values
    # ------------------------------------------------------------------------------------

    def note_boolean(self, array: Any, value: bool) -> None:
        """`if array:`."""
        number = self._entry_of_id.get(id(array))
        if number is not None and number >= 0:
            self.booleans[number] = value

    def note_read(self, array: Any) -> None:
        """`float(array)`, `array.item()`, `numpy.asarray(array)`."""
        number = self._entry_of_id.get(id(array))
        if number is not None and number >= 0 and not self._is_busy:
            self.reads.add(number)

    def _fail(self, error: BaseException, primitive: Any, args: Any) -> None:
        if self.failure is not None:
            return
        code, instruction = self.places.here(sys._getframe(2))
        known = [self._entry_of_id.get(id(arg)) for arg in args]
        text = ", ".join(
            f"{getattr(arg, 'dtype', type(arg).__name__)}{list(np.shape(arg))}" for arg in args
        )
        operation = operation_of(primitive, tuple(getattr(arg, "dtype", None) for arg in args))
        call = self.module_call_of(current_context())
        self.failure = Failure(str(error), call, code, instruction, operation, text, tuple(known))

    def fail_outside(self, error: BaseException, place: Place) -> None:
        """The model raised, and no primitive did."""
        if self.failure is None:
            self.failure = Failure(str(error), self.running, *place, None, "", ())

    # -- afterwards
    # ----------------------------------------------------------------------------------------------

    def finish(self) -> list[int]:
        """Turns the saved arrays into tensors and lets go of the arrays; returns the version of
        each tensor.
        """
        tensors: dict[int, torch.Tensor] = {}

        def tensor_of(array: Any) -> Any:
            if not is_array(array):
                return array
            tensor = tensors.get(id(array))
            if tensor is None:
                tensor = tensors[id(array)] = to_torch(array)
            return tensor

        self.saved_args = {
            entry: (tuple(map(tensor_of, args)), dict(params))
            for entry, (args, params) in self.saved_args.items()
        }
        versions = []
        for entry, array in enumerate(self.values):
            value = None if array is None else tensor_of(array)
            if value is not None and self._transform is not None:
                value = self._transform(value)
            self.values[entry] = value
            versions.append(value._version if isinstance(value, torch.Tensor) else -1)
        self._alive.clear()
        self._entry_of_id.clear()
        self._numbers.clear()
        return versions


_MAKES_CONSTANT = frozenset({"stage", "convert_element_type", "device_put"})
_SAME_ARRAY = frozenset({"broadcast_in_dim", "convert_element_type", "stage"})


def _is_device_array(value: Any) -> bool:
    return not isinstance(value, np.ndarray | np.generic | bool | int | float | complex)
