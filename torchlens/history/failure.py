"""Telling, on the model's own exception, where it was raised."""

from torchlens.capture.recording import Recording
from torchlens.capture.session import CaptureOptions
from torchlens.history.log import Log, source_line

__all__ = ["explain"]


def explain(error: BaseException, recording: Recording, options: CaptureOptions, history_type: type) -> None:
    """Adds a note that names module, operation, argument shapes and source line; hangs the log so far on the exception."""
    history = history_type(Log(recording), options)
    try:
        error.add_note(_note(recording, len(history)))
        error.partial_history = history  # type: ignore[attr-defined]
    except AttributeError:  # an exception that takes no attributes, such as a frozen dataclass
        return


def _note(recording: Recording, num_entries: int) -> str:
    failure = recording.failure
    words = []
    if failure is not None:
        address = recording.module_calls[failure.module_call].address
        kind = recording.module_classes.get(address, "")
        words.append(f"raised in module {address!r} ({kind})" if address else f"raised in {recording.model_name}")
        if failure.operation is not None:
            words.append(f"by the operation {failure.operation.name}({failure.arguments})")
        if failure.code is not None:
            words.append(f"called at {source_line(failure.code, failure.instruction)}")
    count = "1 logged tensor" if num_entries == 1 else f"{num_entries} logged tensors"
    words.append(f"after {count}, which the exception holds as partial_history")
    return f"torchlens: {', '.join(words)}."
