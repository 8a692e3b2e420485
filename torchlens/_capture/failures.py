"""Where the model raised."""

from types import CodeType
from typing import Any

from torchlens._recording.arguments import describe_arguments
from torchlens._recording.operations import Operation
from torchlens._recording.recording import Failure, References


class Failures:
    """Keeps the place of the exception that ends a pass; those that the model handles itself are no
    failure.
    """

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self._error: BaseException | None = None

    def note(
        self,
        error: BaseException,
        module_call: int,
        place: tuple[CodeType | None, int],
        operation: Operation | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        references: References = (),
    ) -> None:
        """Takes down a place that `error` came through; of its way out, the innermost, which is
        told first, stays.
        """
        if not self._is_of(error):
            self._error = error
            arguments = describe_arguments(args, kwargs)
            message = f"{type(error).__name__}: {error}"
            self.failure = Failure(message, module_call, *place, operation, arguments, references)

    def settle(self, error: BaseException | None) -> None:
        """The pass ended with `error`, or without one."""
        if not self._is_of(error):
            self.failure = None
        self._error = None

    def _is_of(self, error: BaseException | None) -> bool:
        """Whether the failure noted is of this exception, or of one that it was raised from."""
        while error is not None:
            if error is self._error:
                return True
            error = error.__cause__ or error.__context__
        return False
