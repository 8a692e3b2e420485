"""Whether logs come back from their files as they went in: `python -m benchmarks.round_trips [NAME
...]`.

The models are some of torchvision, timm, transformers and torch_geometric, from the zoo; names
choose others. Every field of a history and of its entries is compared with that of the loaded one:
values, tables, JSON, drawings, the page.
"""

import argparse
import importlib
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import torchlens as tl
from benchmarks.zoo.specimen import Absent, Specimen
from tests.portable.facts import facts_of
from torchlens._recording.functions import StandIn

_SOURCES = ("torchvision", "timm", "transformers", "geometric")
_MODELS = (
    "alexnet", "resnet18", "mobilenet_v3_small", "squeezenet1_1", "shufflenet_v2_x0_5",
    "vit_tiny_patch16_224", "gpt2",
    "bert", "t5", "distilbert", "llama", "mamba", "vit", "GCN", "GAT", "GraphSAGE", "GIN",
    "EdgeCNN", "SchNet",
)  # fmt: skip


def specimens() -> list[Specimen]:
    found = [
        importlib.import_module(f"benchmarks.zoo.from_{source}").SPECIMENS for source in _SOURCES
    ]
    return [specimen for own in found for specimen in own]


def differing(history: tl.ModelHistory, folder: Path) -> list[str]:
    """The names of the fields that are not the same after saving and loading."""
    history.save(folder / "log.safetensors", params=True)
    expected, found = _facts(history), _facts(tl.load(folder / "log.safetensors"))
    return [
        name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
    ]


def _facts(history: tl.ModelHistory) -> dict[str, Any]:
    """What is live (functions, nodes of autograd) is told by name: in a file it is nothing else."""
    facts = facts_of(history)
    return {
        name: f"function {getattr(fact, '__name__', fact)}" if isinstance(fact, StandIn) else fact
        for name, fact in facts.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=_MODELS, help="names of models in the zoo")
    wanted = set(parser.parse_args().names)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    num_bad = 0
    for specimen in specimens():
        if specimen.short_name not in wanted:
            continue
        start = time.perf_counter()
        try:
            case = specimen.make()
        except Absent as absent:
            print(f"{specimen.name}: {absent}", flush=True)
            continue
        case.model.eval()
        history = tl.log_forward_pass(case.model, list(case.args), case.kwargs)
        with tempfile.TemporaryDirectory() as folder:
            names = differing(history, Path(folder))
        num_bad += bool(names)
        words = (
            f"{len(names)} fields differ: {', '.join(sorted(names)[:5])}" if names else "the same"
        )
        print(
            f"{specimen.name}: {len(history)} entries, {words} ({time.perf_counter() - start:.0f} "
            "s)",
            flush=True,
        )
    return int(num_bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
