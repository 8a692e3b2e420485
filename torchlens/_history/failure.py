"""Notes on the model's own exception where it was raised."""

import re

from torchlens._capture.options import CaptureOptions
from torchlens._history.log import Log
from torchlens._history.model_history import ModelHistory
from torchlens._recording.recording import Recording
from torchlens._recording.user_code import source_line
from torchlens._recording.wrappers import why_valueless


def explain(error: BaseException, recording: Recording, options: CaptureOptions) -> None:
    """Adds a note that names module, operation, argument shapes and source line; hangs the log so
    far on the exception.
    """
    history = ModelHistory(Log(recording), options)
    try:
        error.add_note(_note(recording, len(history)))
        if hint := _hint(error, recording):
            error.add_note(f"torchlens: {hint}")
        error.partial_history = history  # type: ignore[attr-defined]
    except AttributeError:  # an exception that takes no attributes, such as a frozen dataclass
        return


# What torch says when values are wanted of a tensor that has none, or when some tensors have values
# and others none.
_WANTS_VALUES = re.compile(
    r"\bmeta\b|register_meta|FakeTensor|DataDependent|DynamicOutputShape", re.IGNORECASE
)


def _hint(error: BaseException, recording: Recording) -> str:
    """What to do about a tensor without values, if that is what the model failed at."""
    text = f"{type(error).__name__} {error}"
    is_said = any("output_device" in note for note in getattr(error, "__notes__", ()))
    if not isinstance(error, Exception) or is_said or not _WANTS_VALUES.search(text):
        return ""
    sources = [number for _, number in (*recording.inputs, *recording.buffers)]
    tensors = [*recording.params, *(recording.values[number] for number in sources)]
    reasons = [why_valueless(tensor) for tensor in tensors if tensor is not None]
    known = list(dict.fromkeys(reason for reason in reasons if reason is not None))
    if not known:
        return ""
    if None in reasons or re.search(
        "expected device|same device|convert all Tensors to FakeTensors", text
    ):
        return (
            "some of the tensors that came together here, the model's or its inputs, have values, "
            f"and others have none: they are {', '.join(known)}. Make all alike: model.to('meta') "
            "and x.to('meta'), or a model with its weights."
        )
    return (
        f"a tensor that is {' or '.join(known)} has no values. Where a model needs some to go on "
        "(item(), an if, nonzero, a mask as an index), it can be logged up to there; "
        "partial_history has that."
    )


def _note(recording: Recording, num_entries: int) -> str:
    failure = recording.failure
    words = []
    if failure is not None:
        address = recording.module_calls[failure.module_call].address
        kind = recording.module_classes.get(address, "")
        words.append(
            f"raised in module {address!r} ({kind})"
            if address
            else f"raised in {recording.model_name}"
        )
        if failure.operation is not None:
            words.append(f"by the operation {failure.operation.name}({failure.arguments})")
        if failure.code is not None:
            words.append(f"called at {source_line(failure.code, failure.instruction)}")
    count = "1 logged tensor" if num_entries == 1 else f"{num_entries} logged tensors"
    words.append(f"after {count}, which the exception holds as partial_history")
    return f"torchlens: {', '.join(words)}."
