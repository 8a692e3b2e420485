"""Edges between sites: scores against gradients by hand, circuits against a model run by hand."""

import pytest
import torch

import torchlens as tl
from tests.edit.architectures import ARCHITECTURES
from tests.edit.models import Gpt, gpt, resnet
from torchlens import edits

Tensor = torch.Tensor
NODES = ["wte", *[f"h.{number}.{part}" for number in range(3) for part in ("attn", "mlp")]]


def metric(logits: Tensor) -> Tensor:
    return logits[0, -1, 3] - logits[1, -1, 5]


def pair() -> tuple[Gpt, tl.ModelHistory, tl.ModelHistory]:
    model, ids = gpt()
    return model, tl.log_forward_pass(model, ids), tl.log_forward_pass(model, (ids + 5) % 20)


def test_scores_are_changes_times_gradients_at_the_input_of_the_target() -> None:
    model, history, other = pair()
    table = edits.edge_attribution(history, NODES, other, metric)
    scores = {(row.source, row.target): row.score for row in table.itertuples()}
    values, uses, end = [history["wte"].tensor_contents.detach()], {}, None
    for number in range(7):  # each use of a value is a leaf of its own, on top of that value
        uses[number] = [torch.zeros_like(values[0], requires_grad=True) for _ in values]
        given = [value + use for value, use in zip(values, uses[number], strict=True)]
        module = (*[part for block in model.h for part in (block.attn, block.mlp)], model.head)[
            number
        ]
        norm = (
            *[norm for block in model.h for norm in (block.ln_1, block.ln_2)],
            torch.nn.Identity(),
        )
        end = module(norm[number](sum(given[1:], given[0])))
        values.append(end)
    assert end is not None
    metric(end).backward()
    names = [*NODES, "output"]
    for target, leaves in uses.items():
        for source, leaf in enumerate(leaves):
            change = other[NODES[source]].tensor_contents - history[NODES[source]].tensor_contents
            assert leaf.grad is not None
            expected = (change * leaf.grad).sum().item()
            edge = names[source], names[target + 1]
            assert scores.pop(edge) == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert not scores
    assert table["score"].abs().is_monotonic_decreasing


def test_integrated_gradients_are_a_mean_over_inputs_on_the_way() -> None:
    model, history, other = pair()
    nodes = ["wte", "h.2"]
    table = edits.edge_attribution(history, nodes, other, metric, steps=3)
    scores = {(row.source, row.target): row.score for row in table.itertuples()}
    start, end = (log["wte"].tensor_contents.detach() for log in (history, other))
    change = (other["h.2"].tensor_contents - history["h.2"].tensor_contents).detach()
    total, first = torch.zeros(()), torch.zeros(())
    for share in (1 / 6, 3 / 6, 5 / 6):
        x = (start + share * (end - start)).requires_grad_()
        y = model.h[2](model.h[1](model.h[0](x)))
        middle = y.detach().requires_grad_()
        metric(model.head(middle)).backward()
        total += (middle.grad * change).sum() / 3
        (gradient,) = torch.autograd.grad(y, x, middle.grad)
        first += (gradient * (end - start)).sum() / 3
    assert scores["h.2", "output"] == pytest.approx(total.item(), rel=1e-3)
    assert scores["wte", "h.2"] == pytest.approx(first.item(), rel=1e-3)


def test_a_circuit_is_what_the_model_gives_if_only_its_edges_carry_the_recorded_values() -> None:
    model, history, other = pair()
    edges = edits.edge_attribution(history, NODES, other, metric)
    table = edits.faithfulness(history, NODES, other, metric, edges, [0, 7, 12, len(edges)])
    names = [*NODES, "output"]
    old, new = ([log[name].tensor_contents.detach() for name in NODES] for log in (history, other))
    norms = [norm for block in model.h for norm in (block.ln_1, block.ln_2)]
    modules = [part for block in model.h for part in (block.attn, block.mlp)]
    found = []
    for count in (0, 7, 12, len(edges)):
        circuit = {(row.source, row.target) for row in edges.head(count).itertuples()}
        values = [old[0]]
        for target in range(1, 8):
            given = [
                value if (names[source], names[target]) in circuit else new[source]
                for source, value in enumerate(values)
            ]
            x = sum(given[1:], given[0])
            values.append(
                modules[target - 1](norms[target - 1](x)) if target < 7 else model.head(x)
            )
        found.append(metric(values[-1]).item())
    assert found[0] == pytest.approx(metric(other.output).item(), rel=1e-4)
    assert found[-1] == pytest.approx(metric(history.output).item(), rel=1e-4)
    shares = [(value - found[0]) / (found[-1] - found[0]) for value in found]
    assert table["faithfulness"].tolist() == pytest.approx(shares, rel=1e-3, abs=1e-5)
    assert table["faithfulness"].iloc[[0, -1]].tolist() == table["control"].iloc[[0, -1]].tolist()


def test_any_graph_has_edges_and_parts_of_one_value_have_none_between_them() -> None:
    _, history, other = pair()
    nodes = ["wte", *history.sites("head", within="h.1.attn"), "h.1.mlp"]
    table = edits.edge_attribution(history, nodes, other, metric)
    heads = {str(site) for site in nodes[1:-1]}
    assert not (table["source"].isin(heads) & table["target"].isin(heads)).any()
    assert len(table) == 1 + 4 + 4 + 4 + 2
    model, x = resnet()
    first, second = (tl.log_forward_pass(model, own) for own in (x, x.flip(3)))
    nodes = ["1", "2.conv1", "2", "3.conv2", "3"]
    table = edits.edge_attribution(first, nodes, second, lambda out: out[0, 1], steps=2)
    pairs = {(row.source, row.target) for row in table.itertuples()}
    assert pairs == {
        ("1", "2.conv1"), ("1", "2"), ("2.conv1", "2"), ("2", "3.conv2"), ("2", "3"),
        ("3.conv2", "3"), ("3", "output"),
    }  # fmt: skip
    with pytest.raises(ValueError, match="The site 2 is given twice"):
        edits.edge_attribution(first, ["2", "2"], second, lambda out: out[0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "vit", "mamba", "unet", "lstm"])
def test_all_edges_together_restore_the_model_in_any_architecture(name: str) -> None:
    model, args, kwargs = ARCHITECTURES[name].make()
    others = [own.flip(-1) for own in args]
    other_kwargs = {
        key: own.flip(-1) if torch.is_tensor(own) else own for key, own in kwargs.items()
    }
    history = tl.log_forward_pass(model, args, kwargs)
    other = tl.log_forward_pass(model, others, other_kwargs)
    block = ARCHITECTURES[name].block
    source = {"llama": "model.embed_tokens", "vit": "patch_embed", "mamba": "backbone.embeddings",
              "unet": "first", "lstm": "embed"}[name]  # fmt: skip

    def first(out: Tensor) -> Tensor:
        return out.flatten()[0] - out.flatten()[-1]

    nodes = [source, *(["time"] if name == "unet" else []), block]
    edges = edits.edge_attribution(history, nodes, other, first)
    assert (source, block) in set(zip(edges["source"], edges["target"], strict=True))
    table = edits.faithfulness(history, nodes, other, first, edges, [0, len(edges)])
    assert table["faithfulness"].tolist() == pytest.approx([0.0, 1.0])
