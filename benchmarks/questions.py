"""Asks real models the questions of docs/questions.md, and holds the answers against references.

`python -m benchmarks.questions [filter ...]` prints a table with a row for each model:

- graph: ancestors, descendants, `between`, `paths`, `longest_path` against networkx
- attention: weights against those of a kernel written by hand, which the model calls in place of
  `scaled_dot_product_attention`
- outside: the largest change of a unit when everything outside its receptive field is replaced
- inside: the share of the field's elements that have a gradient at one of three random inputs
- table: receptive fields whose size and centre are those of the mask, of all that were compared
- hash: equal for a second model with other weights, another for a shorter input
- receipt: digests survive a file, and change with a weight
- describe: lines; parameters counted by hand; FLOPs counted by torch
"""

import argparse
import math
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import torchlens as tl
from benchmarks.zoo import SPECIMENS
from benchmarks.zoo.specimen import Case
from tests.history.test_queries import check_against_networkx
from torchlens._attention.attention import attention_of, calls_of_attention

NAMES = (
    "torchvision/alexnet", "torchvision/resnet18", "torchvision/densenet121",
    "torchvision/mobilenet_v2", "torchvision/swin_t", "torchvision/vit_b_16",
    "timm/convnext_atto_rms", "timm/mobilevit_xxs", "timm/test_mambaout",
    "transformers/gpt2", "transformers/bert", "transformers/llama", "transformers/t5",
    "torch_geometric/GCN", "torch_geometric/GAT", "torch_geometric/PNA",
)  # fmt: skip
Tensor = torch.Tensor


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.questions")
    parser.add_argument("filter", nargs="*", help="only models whose name contains one of these")
    wanted = parser.parse_args().filter
    heads = ("graph", "attention", "outside", "inside", "table", "hash", "receipt", "describe")
    print(f"{'model':<26}" + "".join(f"{head:<16}" for head in heads))
    checks: tuple[Callable[[Case, str], str], ...] = (
        graph, attention, outside, inside, table, structure, receipt, describe,
    )  # fmt: skip
    for name in NAMES:
        if wanted and not any(part in name for part in wanted):
            continue
        torch.manual_seed(0)
        cells = []
        for check in checks:
            case = SPECIMENS[name].make()
            case.model.eval()
            cells.append(check(case, name))
        print(f"{name:<26}" + "".join(f"{cell:<16}" for cell in cells), flush=True)


def log(case: Case, **options: Any) -> tl.ModelHistory:
    return tl.log_forward_pass(case.model, list(case.args), case.kwargs, **options)


def graph(case: Case, name: str) -> str:
    history = log(case, layers_to_save="none")
    check_against_networkx(history, len(name))
    return f"{len(history)} entries"


def attention(case: Case, name: str) -> str:
    by_hand: list[Tensor] = []

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        times = query.shape[-3] // key.shape[-3] if enable_gqa else 1
        key, value = (own.repeat_interleave(times, -3) for own in (key, value))
        scores = query @ key.mT * (scale or 1 / math.sqrt(query.shape[-1]))
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        by_hand.append(scores.softmax(-1).nan_to_num())
        return by_hand[-1] @ value

    with torch.no_grad(), patch.object(functional, "scaled_dot_product_attention", attend):
        case.model(*case.args, **case.kwargs)
    with torch.no_grad():
        history = log(case)
    calls = calls_of_attention(history._log, range(len(history)))
    found = [attention_of(history._log, call).weights for call in calls]
    compared = 0
    for weights in by_hand:
        closest = min(
            float((own - weights).abs().max()) for own in found if own.shape == weights.shape
        )
        assert closest < 1e-5, f"{name}: an attention differs by {closest}"
        compared += 1
    return f"{compared} of {len(found)}" if found else "-"


def units(history: tl.ModelHistory, count: int = 3) -> list[tuple[str, tuple[int, ...]]]:
    """Random units of entries in the middle of the model."""
    chooser = random.Random(0)
    first = history.input_layers[0]
    known = history[first].descendants()
    chosen = chooser.sample([e for e in known if e.tensor_dtype.is_floating_point], count)
    return [
        (entry.layer_label_w_pass, tuple(chooser.randrange(size) for size in entry.tensor_shape))
        for entry in chosen
    ]


def first_input(case: Case) -> Tensor:
    return next(own for own in (*case.args, *case.kwargs.values()) if isinstance(own, Tensor))


def replaced(x: Tensor, mask: Tensor) -> Tensor:
    """Other random values outside the mask."""
    if x.is_floating_point():
        return torch.where(mask, x, torch.randn_like(x) * 3)
    return torch.where(mask, x, x[..., torch.randperm(x.shape[-1])])


def outside(case: Case, name: str) -> str:
    x = first_input(case)
    with torch.no_grad():
        history = log(case)
        worst, kept = 0.0, x.clone()
        for label, unit in units(history):
            field = history.receptive_field(label, unit, of=history.input_layers[0])
            if not field.masks:
                continue
            before = history[label].tensor_contents[unit]
            x.copy_(replaced(kept, field.mask))
            after = log(case, layers_to_save=[label])[label].tensor_contents[unit]
            x.copy_(kept)
            worst = max(worst, float((after - before).abs() / before.abs().clamp(min=1)))
    assert worst < 1e-5, f"{name}: a unit changes by {worst} with what lies outside its field"
    return f"{worst:.0e}"


def inside(case: Case, name: str) -> str:
    x = first_input(case)
    if not x.is_floating_point():
        return "-"
    shares = []
    for number in range(3):
        reached: Tensor | None = None
        for seed in range(3):
            torch.manual_seed(seed)
            x.detach_().copy_(torch.randn_like(x)).requires_grad_()
            history = log(case)
            label, unit = units(history)[number]
            field = history.receptive_field(label, unit, of=history.input_layers[0])
            if not field.masks:
                break
            hit = field.gradient != 0
            reached = hit if reached is None else reached | hit
        if reached is not None:
            shares.append(float(reached.sum() / field.mask.sum()))
    return " ".join(f"{share:.0%}" for share in shares)


def table(case: Case, name: str) -> str:
    history = log(case)
    source = history.input_layers[0]
    if history[source].tensor_shape[1:2] != (3,):
        return "-"
    rows, right, compared = history.receptive_fields(of=source), 0, 0
    for entry in history.find(["conv2d", "maxpool2d"])[:6]:
        shape = entry.tensor_shape
        unit = (0, 0, *(size // 2 for size in shape[2:]))
        row, field = rows[entry.layer_label], entry.receptive_field(unit)
        bounds = field.bounds
        is_cut = bounds is None or any(
            own.start == 0 or own.stop == size
            for own, size in zip(bounds[2:], history[source].tensor_shape[2:], strict=True)
        )
        if is_cut or None in row.stride:
            continue
        places = zip(row.centre, row.stride, unit[2:], strict=True)
        centre = tuple(centre + stride * place for centre, stride, place in places)
        compared += 1
        right += field.size[2:] == row.size and field.centre[2:] == centre
    assert right == compared, f"{name}: {right} of {compared} rows of the table are right"
    return f"{right} of {compared}"


def structure(case: Case, name: str) -> str:
    torch.manual_seed(1)
    other = SPECIMENS[name].make()
    other.model.eval()
    for ours, theirs in zip(case.args, other.args, strict=True):
        if isinstance(ours, Tensor) and not ours.is_floating_point():
            theirs.copy_(ours)  # the edges of a graph are part of what is computed
    hashes = [log(own, layers_to_save="none").structure_hash for own in (case, other)]
    assert hashes[0] == hashes[1], f"{name}: other weights give another hash"
    case.model.train()
    for module in case.model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm | torch.nn.Dropout):
            changed = log(case, layers_to_save="none").structure_hash
            assert changed != hashes[0], f"{name}: training has the hash of evaluation"
            return "same, differs"
    return "same"


def receipt(case: Case, name: str) -> str:
    history = log(case)
    with tempfile.TemporaryDirectory() as folder:
        history.save(Path(folder, "log.safetensors"))
        content = Path(folder, "log.safetensors").read_bytes()
        assert str(Path.cwd()).encode() not in content, f"{name}: a path of this machine"
        assert tl.load(Path(folder, "log.safetensors")).receipt == history.receipt
    with torch.no_grad():
        next(case.model.parameters()).view(-1)[0] += 1
    other = log(case).receipt
    assert other.weights != history.receipt.weights
    assert (other.structure, other.inputs) == (history.receipt.structure, history.receipt.inputs)
    return "kept, changes"


def describe(case: Case, name: str) -> str:
    history = log(case, layers_to_save="none")
    text = history.describe()
    total = sum(param.numel() for param in case.model.parameters())
    assert f": {total:,} parameters" in text.splitlines()[0]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        case.model(*case.args, **case.kwargs)
    products = sum(
        entry.flops or 0
        for entry in history.find(
            ["conv*", "linear", "matmul", "bmm", "addmm", "baddbmm", "scaleddot*", "mm", "einsum"]
        )
    )
    counted = counter.get_total_flops()
    assert len(text.splitlines()) <= 40
    return f"{len(text.splitlines())} lines ×{products / max(counted, 1):.2f}"


if __name__ == "__main__":
    main()
