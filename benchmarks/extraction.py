"""Times the extraction of layers of ResNet-18 by one tool, in the process and environment it is run
in; prints one line of JSON.

    python -m benchmarks.extraction TOOL WORKLOAD [--seconds 20]

A call on many batches is compared with one on few: the difference, for a batch, leaves out what a
tool does once. Plain passes take turns with both. All is processor time of one thread of torch, so
that other programs on the machine hardly matter, and includes the threads that read and write.
"""

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.workloads import WORKLOADS as MODELS

FIVE = ["layer1", "layer2", "layer3", "layer4", "fc"]
# name → layers, batch size, batches in the short and in the long call
WORKLOADS: dict[str, tuple[list[str], int, int, int]] = {
    "five layers, batches of 32": (FIVE, 32, 1, 3),
    "five layers, one by one": (FIVE, 1, 4, 44),
    "`layer3` alone, batches of 32": (["layer3"], 32, 1, 3),
    "`layer3` alone, one by one": (["layer3"], 1, 4, 44),
}
Extract = Callable[[torch.nn.Module, list[str], torch.Tensor, int], Any]


def split(data: torch.Tensor, size: int) -> Any:
    return data.split(size)


class Nothing:
    """A reduction that forgets."""

    def update(self, rows: Any, ids: Any) -> None:
        pass


def by_torchlens(model: Any, layers: list[str], data: torch.Tensor, size: int) -> None:
    import torchlens

    torchlens.extract(model, data, layers, None, into=[Nothing()], batch_size=size)


def by_torchlens_stored(model: Any, layers: list[str], data: torch.Tensor, size: int) -> None:
    """Written to the disk, in shards of a batch of 32."""
    import torchlens

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f"
        torchlens.extract(model, data, layers, path, batch_size=size, shard_size=32)


def by_newest(model: Any, layers: list[str], data: torch.Tensor, size: int) -> None:
    """It does not find a layer by the name of a module in the model itself."""
    import torchlens

    keys = ["linear_1" if layer == "fc" else layer for layer in layers]
    torchlens.extract_dataset(model, data, keys, batch_size=size, progress=False)


def by_thingsvision(model: Any, layers: list[str], data: torch.Tensor, size: int) -> None:
    """It takes one layer at a time: a run of the model for each."""
    from thingsvision import get_extractor_from_model

    extractor = get_extractor_from_model(model=model, device="cpu", backend="pt")
    batches = split(data, size)
    for layer in layers:
        extractor.extract_features(
            batches=batches, module_name=layer, flatten_acts=False, output_type="ndarray"
        )


def by_captum(model: Any, layers: list[str], data: torch.Tensor, size: int) -> None:
    from captum.attr import LayerActivation

    activation = LayerActivation(model, [model.get_submodule(layer) for layer in layers])
    for batch in split(data, size):
        [one.numpy() for one in activation.attribute(batch)]


def by_hooks(model: Any, layers: list[str], data: torch.Tensor, size: int) -> None:
    kept: dict[str, np.ndarray] = {}
    handles = [
        model.get_submodule(layer).register_forward_hook(
            lambda module, args, output, layer=layer: kept.__setitem__(layer, output.numpy())
        )
        for layer in layers
    ]
    for batch in split(data, size):
        model(batch)
    for handle in handles:
        handle.remove()


TOOLS: dict[str, Extract] = {
    "torchlens": by_torchlens,
    "stored": by_torchlens_stored,
    "hooks": by_hooks,
    "newest": by_newest,
    "thingsvision": by_thingsvision,
    "captum": by_captum,
}


def cost(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def measure(extract: Extract, workload: str, seconds: float) -> dict[str, float]:
    layers, size, few, many = WORKLOADS[workload]
    model, _ = MODELS["ResNet-18 224"]()
    model.eval()
    data = torch.rand(many * size, 3, 224, 224)

    def plain() -> None:
        for batch in split(data[few * size :], size):
            model(batch)

    with torch.no_grad():
        plain()
        extract(model, layers, data[: few * size], size)
        times: list[tuple[float, float]] = []
        stop = time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < stop:
            short = cost(lambda: extract(model, layers, data[: few * size], size))
            forward = cost(plain)
            long = cost(lambda: extract(model, layers, data, size))
            times.append((long - short, forward))
    own, forward = (statistics.median(column) for column in zip(*times, strict=True))
    each = forward / (many - few)
    return {"plain": each, "ratio": own / forward, "runs": len(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", choices=list(TOOLS))
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of the libraries that are measured
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(json.dumps(measure(TOOLS[options.tool], options.workload, options.seconds)))


if __name__ == "__main__":
    main()
