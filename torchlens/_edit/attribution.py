"""Attribution patching: what edits would do to a metric, from one gradient instead of many runs."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchlens._edit.changes import own_generator
from torchlens._edit.plan import Target
from torchlens._edit.replayer import Replayer
from torchlens._edit.sweep import edit_at
from torchlens._history.attention_parts import attentions_in
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log import Log
from torchlens._history.model_history import ModelHistory
from torchlens._history.residuals import residuals
from torchlens._history.sites import Place, Site
from torchlens.errors import EditError

if TYPE_CHECKING:
    import pandas

Tensor = torch.Tensor
Metric = Callable[[Any], Any]


class Changed(NamedTuple):
    """A site with the change that an edit makes to the value there."""

    site: Site
    target: Target
    difference: Tensor  # of the whole value of the entry

    @property
    def place(self) -> Place:
        return self.target.edited.place


def changed_at(replayer: Replayer, sites: Iterable[Any], edit: Any) -> list[Changed]:
    """The sites with what the edit, or another history, changes there."""
    found = []
    for each in sites:
        site = each if isinstance(each, Site) else Site(each)
        target = replayer.target(site, edit_at(replayer, site, edit))
        recorded = target.edited.recorded().detach()
        if not recorded.is_floating_point():
            raise EditError(
                f"{site} has {recorded.dtype} values, which have no gradient. Name what is made of "
                "them, such as the embedding."
            )
        new = target.edited.value(recorded)
        assert new is not None
        found.append(Changed(site, target, new.detach() - recorded))
    return found


class KeptGraph:
    """A replay with an autograd graph that starts at some entries: `kept` has their values."""

    def __init__(self, replayer: Replayer, entries: Iterable[int], metric: Metric) -> None:
        self.kept: dict[int, Tensor] = {}
        edits = {
            LayerEntry(replayer.log, entry): self._keeping(entry) for entry in sorted({*entries})
        }
        self.metric = scalar(metric, replayer.replay(edits, grad=True).output)

    def _keeping(self, entry: int) -> Callable[[Tensor], Tensor]:
        def keep(value: Tensor) -> Tensor:
            self.kept[entry] = value if value.requires_grad else value.requires_grad_()
            return self.kept[entry].clone()  # the model may write to it

        return keep

    def gradients(self, dropped: Iterable[int] = ()) -> dict[int, Tensor]:
        """Of the metric at the entries; none passes back through what is dropped."""
        handles = [self.kept[entry].register_hook(torch.zeros_like) for entry in dropped]
        values = list(self.kept.values())
        found = torch.autograd.grad(self.metric, values, retain_graph=True, allow_unused=True)
        for handle in handles:
            handle.remove()
        zeros = map(torch.zeros_like, values)
        own = (zero if grad is None else grad for grad, zero in zip(found, zeros, strict=True))
        return dict(zip(self.kept, own, strict=True))


def scalar(metric: Metric, output: Tensor) -> Tensor:
    """The metric of an output, checked to be one number with a gradient."""
    with torch.enable_grad():
        value = metric(output)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise TypeError(
            "The metric must return a tensor with one element, made of the output with torch's "
            "functions (without .item() or .detach()), so that it has a gradient."
        )
    return value


def attribution(
    history: ModelHistory,
    sites: Iterable[Any],
    edit: Any,
    metric: Metric,
    *,
    through_attention: bool = True,
    drop: Any = None,
    check: int = 0,
    seed: int = 0,
) -> "pandas.DataFrame":
    """As `torchlens.edits.attribution`."""
    import pandas as pd

    replayer = history._replayer
    changes = changed_at(replayer, sites, edit)
    if through_attention:
        changes = [_behind_attention(replayer, change) for change in changes]
    dropped = _dropped(replayer, drop)
    graph = KeptGraph(replayer, [*(one.place.entry for one in changes), *dropped], metric)
    gradients = graph.gradients()
    generator = own_generator(seed)
    table = pd.DataFrame(
        {
            "site": str(one.site),
            "key": _key_of(one.site),
            "part": _part_of(one.site),
            "estimate": _effect(one.difference, gradients[one.place.entry]),
            "control": _effect(
                random_like(one.difference, generator), gradients[one.place.entry]
            ),
        }
        for one in changes
    )  # fmt: skip
    if dropped:
        table["dropped"] = _mean_of_dropped(graph, changes, dropped)
    if check:
        _add_exact(table, history, [one.site for one in changes], edit, metric, check, seed)
    return table


def _key_of(site: Site) -> str:
    return site.key.layer_label if isinstance(site.key, LayerEntry) else str(site.key)


def _part_of(site: Site) -> str:
    return " ".join(filter(None, [site.part, site.parts_text]))


def _effect(difference: Tensor, gradient: Tensor) -> float:
    return float((difference.double() * gradient.double()).sum())


def random_like(difference: Tensor, generator: torch.Generator) -> Tensor:
    """A change in a random direction, where another change is not zero and as large."""
    random = torch.randn(difference.shape, generator=generator).to(difference)
    random = random * (difference != 0)
    return random * (difference.norm() / random.norm().clamp_min(1e-30))


def _behind_attention(replayer: Replayer, change: Changed) -> Changed:
    """The change at the attention's result that a change of its queries or keys makes, exactly.

    The result is linear in the attention weights, so a gradient there estimates what it would at
    the weights, and the softmax, which gradients estimate badly, is computed again.
    """
    if change.site.part not in ("q", "k"):
        return change
    entry = change.place.entry
    out = next(one.out for one in attentions_in(replayer.log, 0) if entry in (one.q, one.k))
    edits = {change.site: change.target.edited.edit}
    new = replayer.replay(edits, [LayerEntry(replayer.log, out)], grad=False).output
    target = replayer.target(LayerEntry(replayer.log, out), 0.0)
    return Changed(change.site, target, new - target.edited.recorded().detach())


def contributions(log: Log) -> list[int]:
    """The entries that blocks add to the residual stream."""
    found = []
    for one in residuals(log):
        way = {one.start._entry, *(each._entry for each in one.carried)}
        found += [entry for entry in log.graph.parents[one.end._entry] if entry not in way]
    return found


def _dropped(replayer: Replayer, drop: Any) -> list[int]:
    if drop is None:
        return []
    if not isinstance(drop, str):
        return [replayer.sites.place(each).entry for each in drop]
    if drop != "residual":
        raise ValueError(f"drop must be 'residual', or a list of keys or sites, got {drop!r}.")
    return contributions(replayer.log)


def _mean_of_dropped(
    graph: KeptGraph, changes: list[Changed], dropped: Sequence[int]
) -> list[float]:
    """AtP*'s mean of the sizes of the estimates, each without the gradient through one of them."""
    if len(dropped) < 2:
        raise ValueError("drop needs two sites or more: the mean is over all but one's own.")
    sums = torch.zeros(len(changes), dtype=torch.float64)
    for entry in dropped:
        gradients = graph.gradients([entry])
        effects = [_effect(one.difference, gradients[one.place.entry]) for one in changes]
        sums += torch.tensor(effects, dtype=torch.float64).abs()
    found: list[float] = (sums / (len(dropped) - 1)).tolist()
    return found


def _add_exact(
    table: "pandas.DataFrame",
    history: ModelHistory,
    sites: list[Site],
    edit: Any,
    metric: Metric,
    check: int,
    seed: int,
) -> None:
    """Adds the exact effects at some random sites, and how the estimates correlate with them."""
    order = torch.randperm(len(sites), generator=torch.Generator().manual_seed(seed))
    chosen = sorted(order[:check].tolist())
    before = float(metric(_recorded_output(history)))
    rows = history.sweep([sites[number] for number in chosen], edit, metric)
    if any(row.value is None for row in rows):
        raise EditError(f"No exact effect to check: {rows[0].certificate.reason}")
    table["exact"] = float("nan")
    table.loc[chosen, "exact"] = [row.value - before for row in rows]
    known = table.loc[chosen]
    table.attrs["correlation"] = float(known["estimate"].corr(known["exact"]))


def _recorded_output(history: ModelHistory) -> Tensor:
    value: Tensor = history[history.output_layers[0]].tensor_contents
    return value.detach()
