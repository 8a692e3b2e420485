"""Records every primitive that runs: one row for each array that it makes."""

import sys
import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from torchlens._jax.arrays import is_array, number_of, shape_and_dtype, to_torch
from torchlens._jax.internals import concrete, current_context, scopes_of
from torchlens._jax.primitives import compiled_once, operation_of
from torchlens._jax.programs import INLINED
from torchlens._jax.user_lines import Place, UserLines
from torchlens._recording.operations import BUFFER, OUTPUT, Operation
from torchlens._recording.recording import Failure, ModuleCall, Row, make_row


class _ThreadLog(threading.local):
    """The recorder and the module tracker of the log of this thread, if there is one."""

    recorder: "PrimitiveRecorder | None" = None
    tracker: Any = None


CURRENT = _ThreadLog()


class PrimitiveRecorder:
    """Records the primitives of one run, and knows its arrays by their ids: it keeps them alive.

    `saves` says which entries keep their value: True, False, or their numbers. The conversion of a
    constant (`1e-5` to an array, that array to float32) is no entry: the constant is an argument of
    the operation that uses it, as in a jaxpr. Nor is a conversion to the type or shape that the
    array already has.
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
        self.places = UserLines()
        self.call_of_scope: dict[str, int] = {}
        # Names of arrays, by id, that become entries when an operation reads them.
        self.names: dict[int, str] = {}
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

    # -- sources and outputs
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
        """The entry or parameter of an array (inside its tracers); an unknown array becomes a
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
        """Adds an array that is neither argument nor result: a global variable, a constant."""
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

    # -- primitives
    # --------------------------------------------------------------------------------------

    def process(
        self,
        original: Callable[..., Any],
        trace: Any,
        primitive: Any,
        args: Any,
        params: dict[str, Any],
    ) -> Any:
        """Runs a primitive, as JAX's own `process_primitive` does, and records it."""
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
        """True for a conversion that changes nothing: the result is the same entry."""
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
        """True if it only converted a constant: a number to an array, or such an array."""
        if primitive.name not in _MAKES_CONSTANT or len(args) > 1:
            return False
        result = result[0] if primitive.multiple_results else result
        source = id(args[0])
        is_entry = source in self._entry_of_id
        is_number = source in self._numbers or isinstance(args[0], _PLAIN_NUMBERS)
        if result.shape or is_entry or not is_number:
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
        references = tuple(map(self._reference, args))
        rest = self._constants(args, references)
        dtypes = tuple(getattr(arg, "dtype", None) for arg in args)
        call = self.module_call_of(context)
        operation = operation_of(primitive, dtypes, self.is_backward)
        head = (operation, rest, params, references, call, code, instruction, seconds)
        results = result if primitive.multiple_results else (result,)
        is_one = len(results) == 1
        for index, array in enumerate(results):
            if not is_array(array):
                continue
            entry = len(self.rows)
            self.rows.append(
                make_row((*head, None if is_one else index, *shape_and_dtype(array), None))
            )
            is_saved = self._is_saved(entry)
            self.values.append(array if is_saved else None)
            self.know(array, entry)
            if self._keeps_args and is_saved:
                self.saved_args[entry] = (args, params)

    def _reference(self, arg: Any) -> int | None:
        number = self._entry_of_id.get(id(arg))
        return self.find(arg) if number is None else number

    def _constants(self, args: Any, references: Sequence[int | None]) -> tuple[Any, ...]:
        """The arguments that are no entries; None in place of the others."""
        return tuple(
            self._constant(arg) if number is None else None
            for arg, number in zip(args, references, strict=True)
        )

    def _constant(self, arg: Any) -> Any:
        number = self._numbers.get(id(arg))
        if number is None and is_array(arg) and not arg.ndim:
            return number_of(arg)
        return arg if number is None else number

    def module_call_of(self, context: Any) -> int:
        """The module call around an operation; of a gradient, the (finished) call of the operation
        that it is the gradient of.
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

    # -- reads of values
    # ------------------------------------------------------------------------------------

    def note_boolean(self, array: Any, value: bool) -> None:
        """Notes `if array:`."""
        number = self._entry_of_id.get(id(array))
        if number is not None and number >= 0:
            self.booleans[number] = value

    def note_read(self, array: Any) -> None:
        """Notes `float(array)`, `array.item()`, `numpy.asarray(array)`."""
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
        """Notes that the model raised outside a primitive."""
        if self.failure is None:
            self.failure = Failure(str(error), self.running, *place, None, "", ())

    # -- end
    # ----------------------------------------------------------------------------------------------

    def finish(self) -> list[int]:
        """Converts the saved arrays to tensors and releases the arrays; returns the version of each
        tensor.
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


_PLAIN_NUMBERS = (np.ndarray, np.generic, bool, int, float, complex)
