"""Path patching: an edit that reaches some sites straight, around all others."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torchlens._edit.changes import Control
from torchlens._edit.replayer import Replayer
from torchlens._edit.sweep import edit_at
from torchlens._history.model_history import ModelHistory
from torchlens._history.sites import Site

if TYPE_CHECKING:
    import pandas


def path_patching(
    history: ModelHistory,
    senders: Iterable[Any],
    receivers: Iterable[Any],
    edit: Any,
    metric: Callable[[Any], Any],
    *,
    hold: Iterable[Any] = (),
) -> "pandas.DataFrame":
    """As `torchlens.edits.path_patching`."""
    import pandas as pd

    replayer = history._replayer
    held = list(hold)
    ends = [own if isinstance(own, Site) else Site(own) for own in receivers]
    rows = []
    for sender in senders:
        site = sender if isinstance(sender, Site) else Site(sender)
        own = edit_at(replayer, site, edit)
        for receiver in ends:
            found = [_along(replayer, site, receiver, each, held) for each in (own, Control(own))]
            new, control = (float(metric(out.output)) for out in found)
            rows.append((str(site), str(receiver), new, control, found[0].certificate.kind))
    return pd.DataFrame(rows, columns=["sender", "receiver", "metric", "control", "certificate"])


def _along(replayer: Replayer, sender: Site, receiver: Site, edit: Any, hold: list[Any]) -> Any:
    """The model's output, if only the receiver sees the edit of the sender."""
    ends = {replayer.sites.place(sender).entry, replayer.sites.place(receiver).entry}
    others = [each for each in hold if replayer.sites.place(each).entry not in ends]
    seen = replayer.replay({sender: edit}, [receiver], others, grad=False).output
    return replayer.replay({receiver: seen}, grad=False)
