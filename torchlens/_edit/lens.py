"""What the end of a model makes of earlier values: the logit lens, and each block's share."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torchlens._edit.attribution import random_like
from torchlens._edit.changes import own_generator
from torchlens._edit.replayer import Replayer
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log import Log
from torchlens._history.model_history import ModelHistory
from torchlens._history.residuals import residuals
from torchlens.errors import EditError

if TYPE_CHECKING:
    import pandas

Tensor = torch.Tensor
_ADDITIONS = frozenset({"add", "iadd", "radd"})
# The scale of a norm written out, by which the values are multiplied or divided.
_SCALES = frozenset({"rsqrt", "sqrt", "std"})


def _last(history: ModelHistory, stream: Any) -> int:
    """The entry at which the residual stream ends."""
    if stream is not None:
        return history._replayer.sites.place(stream).entry
    found = residuals(history._log)
    if not found:
        raise EditError(
            "This model has no residual connection. Say where its last representation is: "
            "stream='layer4'."
        )
    return found[-1].end._entry


def logit_lens(
    history: ModelHistory, *, token: int = -1, stream: Any = None, seed: int = 0
) -> "pandas.DataFrame":
    """As `torchlens.edits.logit_lens`."""
    import pandas as pd

    log, replayer = history._log, history._replayer
    last = _last(history, stream)
    generator = own_generator(seed)
    final = _probabilities(replayer, last, _saved(log, last), token)
    answer = final.argmax(-1, keepdim=True)
    rows = []
    for one in history.sites("residual"):
        entry = replayer.sites.place(one).entry
        if log.row(entry).shape != log.row(last).shape or entry > last:
            continue
        value = _saved(log, entry)
        found = _probabilities(replayer, last, value, token)
        control = _probabilities(replayer, last, random_like(value, generator), token)
        for row, own in enumerate(found):
            rows.append(
                {
                    "site": str(one),
                    "module": _name(log, entry),
                    "row": row,
                    "top": int(own.argmax()),
                    "probability": float(own.max()),
                    "answer": float(own[answer[row]]),
                    "divergence": float((final[row] * (final[row] / own).log()).nansum()),
                    "control": float(control[row, answer[row]]),
                }
            )
    return pd.DataFrame(rows)


def _saved(log: Log, entry: int) -> Tensor:
    value = log.value(entry)
    if not isinstance(value, Tensor):
        raise EditError(f"{log.label(entry)!r} was not saved. Log with layers_to_save='all'.")
    return value.detach()


def _probabilities(replayer: Replayer, last: int, value: Tensor, token: int) -> Tensor:
    """What the end of the model makes of a value, at one token."""
    logits = replayer.replay({LayerEntry(replayer.log, last): value}, grad=False).output
    own = logits[:, token] if logits.ndim == 3 else logits
    return own.double().softmax(-1)


# -- the shares of blocks
# --------------------------------------------------------------------------------------------------


def direct_attribution(
    history: ModelHistory, metric: Callable[[Tensor], Any], *, stream: Any = None
) -> "pandas.DataFrame":
    """As `torchlens.edits.direct_attribution`."""
    import pandas as pd

    log = history._log
    last = _last(history, stream)
    end = _LinearEnd(history._replayer, last)
    nothing = float(metric(end(torch.zeros_like(_saved(log, last)))))
    rows = [("(bias)", "", nothing)]
    for entry in _terms(log, last):
        value = _saved(log, entry).expand(log.row(last).shape)
        rows.append((log.label(entry), _name(log, entry), float(metric(end(value))) - nothing))
    return pd.DataFrame(rows, columns=["site", "module", "share"])


def _terms(log: Log, entry: int) -> list[int]:
    """What was added up to an entry, in order."""
    end = entry
    while (parent := _handed_on(log, end)) is not None:
        end = parent
    parents = log.graph.parents[end]
    least = len(log.row(end).shape) - 1
    is_sum = log.row(end).operation.layer_type in _ADDITIONS and len(parents) == 2
    if not is_sum or any(len(log.row(parent).shape) < least for parent in parents):
        return [entry]
    return sorted(term for parent in parents for term in _terms(log, parent))


def _handed_on(log: Log, entry: int) -> int | None:
    """The parent whose value an entry has, such as that of a cast or of a dropout in eval."""
    parents = log.graph.parents[entry]
    if len(parents) != 1 or log.row(parents[0]).shape != log.row(entry).shape:
        return None
    is_same = torch.equal(_saved(log, entry).double(), _saved(log, parents[0]).double())
    return parents[0] if is_same else None


def _name(log: Log, entry: int) -> str:
    """The outermost module that returned an entry."""
    calls = log.graph.modules_exited.get(entry, ())
    return min((log.module_call_addresses[call] for call in calls), key=len, default="")


class _LinearEnd:
    """The end of the model behind the residual stream, with the scale of its norm as recorded."""

    def __init__(self, replayer: Replayer, last: int) -> None:
        self._replayer, self._last = replayer, last
        log = replayer.log
        behind = _descendants(log, last)
        kinds = {entry: log.row(entry).operation.layer_type for entry in behind}
        self._norm = next((own for own in behind if kinds[own] in ("layernorm", "rmsnorm")), None)
        self._hold = [LayerEntry(log, own) for own in behind if kinds[own] in _SCALES]
        if self._norm is not None:
            self._is_centred = kinds[self._norm] == "layernorm"
            recorded = _saved(log, last)
            zero = {LayerEntry(log, last): torch.zeros_like(recorded)}
            norm = LayerEntry(log, self._norm)
            self._bias = replayer.replay(zero, [norm], grad=False).output
            # What a centred value is multiplied by; where it is 0, so is what it makes.
            scale = (_saved(log, self._norm) - self._bias).double() / self._centred(recorded)
            self._scale = scale.nan_to_num(0.0, 0.0, 0.0)

    def __call__(self, value: Tensor) -> Tensor:
        log = self._replayer.log
        entry = self._last
        if self._norm is not None:
            entry = self._norm
            value = (self._centred(value) * self._scale).to(value.dtype) + self._bias
        edits = {LayerEntry(log, entry): value}
        return self._replayer.replay(edits, hold=self._hold, grad=False).output

    def _centred(self, value: Tensor) -> Tensor:
        value = value.double()
        return value - value.mean(-1, keepdim=True) if self._is_centred else value


def _descendants(log: Log, start: int) -> list[int]:
    found = {start}
    for entry in range(start + 1, len(log.graph.recorded)):
        if not found.isdisjoint(log.graph.parents[entry]):
            found.add(entry)
    return sorted(found - {start})
