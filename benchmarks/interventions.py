"""What interventions cost: heads of GPT-2 small set to zero, 16 tokens, logits of the last one.

`python -m benchmarks.interventions` prints the table; `--write` puts it into docs/costs.md. Peers run
in environments of their own, as in `benchmarks/run.py`. Every figure is how many times faster a tool
is than a pass of the model with a plain hook, the two taking turns in one process, by CPU time.
Where the results are the same model's, they are compared with those of the hooks.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import process_time
from typing import Any

NAMES = {
    "replay": "`history.replay`, one head a call, the log ready",
    "sweep": "`history.sweep`, all 144 heads, from a new log",
    "batched": "`history.sweep(batched=True)`, all 144 heads, from a new log",
    "path": "direct effect of a head: `replay` with all other paths held",
    "layer 0": "`replay`, heads of layer 0",
    "layer 6": "`replay`, heads of layer 6",
    "layer 11": "`replay`, heads of layer 11",
    "nnsight": "nnsight 0.8.1, one trace a head",
    "transformerlens": "TransformerLens 3.9.0, `run_with_hooks`, its own GPT-2, logits of all tokens",
}
PEERS = ("nnsight", "transformerlens")
LAYERS = HEADS = 12
OPTIONS = {"use_cache": False, "logits_to_keep": 1}
START, END = "<!-- interventions:start -->", "<!-- interventions:end -->"


def make() -> tuple[Any, Any]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0)).eval()
    return model, torch.randint(0, 50_000, (1, 16))


@contextmanager
def without_head(model: Any, layer: int, head: int) -> Iterator[None]:
    def change(module: Any, args: Any) -> Any:
        value = args[0].clone()
        value[..., head * 64 : head * 64 + 64] = 0
        return (value,)

    handle = model.transformer.h[layer].attn.c_proj.register_forward_pre_hook(change)
    try:
        yield
    finally:
        handle.remove()


def hooked(model: Any, ids: Any, layer: int, head: int) -> Any:
    with without_head(model, layer, head):
        return model(ids, **OPTIONS).logits[0, -1]


def seconds(run: Callable[[], Any]) -> float:
    start = process_time()
    run()
    return process_time() - start


def own(model: Any, ids: Any) -> dict[str, float]:
    import torch

    import torchlens as tl

    sites = [tl.edits.site(f"transformer.h.{n // HEADS}.attn", head=n % HEADS) for n in range(144)]
    expected = [hooked(model, ids, n // HEADS, n % HEADS) for n in range(144)]
    took = dict.fromkeys(NAMES, 0.0)
    hooks: list[float] = []
    names = [f"transformer.h.{n}.{kind}" for n in range(LAYERS) for kind in ("attn", "mlp")]
    hold = names[1:]
    for _ in range(2):
        hooks += [
            seconds(lambda n=n: hooked(model, ids, n // HEADS, n % HEADS)) for n in range(144)
        ]
        history = tl.log_forward_pass(model, ids, OPTIONS)
        history.layer_labels  # noqa: B018 (the graph is made at the first look)
        found: list[Any] = []
        took["sweep"] += seconds(
            lambda h=history, f=found: f.append(h.sweep(sites, 0.0, lambda logits: logits[0, -1]))
        )
        assert all(map(torch.equal, expected, found[0].values))
        each = [seconds(lambda s=s, h=history: h.replay({s: 0.0})) for s in sites]
        took["replay"] += sum(each)
        for layer in (0, 6, 11):
            took[f"layer {layer}"] += 12 * sum(each[12 * layer : 12 * layer + 12])
        history.replay({sites[0]: 0.0}, hold=hold)
        took["path"] += 12 * sum(
            seconds(lambda s=s, h=history: h.replay({s: 0.0}, hold=hold)) for s in sites[:12]
        )
        batch = tl.log_forward_pass(model, ids, OPTIONS)
        batch.layer_labels  # noqa: B018
        took["batched"] += seconds(
            lambda h=batch: h.sweep(sites, 0.0, lambda logits: logits[0, -1], batched=True)
        )
    return {name: sum(hooks) / total for name, total in took.items() if total}


def of_nnsight(model: Any, ids: Any) -> Callable[[int, int], Any]:
    from nnsight import NNsight

    wrapped = NNsight(model)

    def run(layer: int, head: int) -> Any:
        with wrapped.trace(ids, **OPTIONS):
            wrapped.transformer.h[layer].attn.c_proj.input[..., head * 64 : head * 64 + 64] = 0
            logits = wrapped.output.logits.save()
        return logits[0, -1]

    return run


def of_transformer_lens(model: Any, ids: Any) -> Callable[[int, int], Any]:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=12, d_model=768, n_ctx=1024, d_head=64, n_heads=12, d_mlp=3072, d_vocab=50257,
        act_fn="gelu_new", normalization_type="LN",
    )  # fmt: skip
    other = HookedTransformer(config).eval()

    def run(layer: int, head: int) -> Any:
        def change(value: Any, hook: Any) -> Any:
            value[:, :, head] = 0
            return value

        name = f"blocks.{layer}.attn.hook_z"
        return other.run_with_hooks(ids, fwd_hooks=[(name, change)])[0, -1]

    return run


def peer(name: str, model: Any, ids: Any) -> dict[str, float]:
    import torch

    make_run = of_nnsight if name == "nnsight" else of_transformer_lens
    run = make_run(model, ids)
    result, expected = run(3, 3), hooked(model, ids, 3, 3)
    assert name != "nnsight" or torch.equal(result, expected)
    took, hooks = 0.0, 0.0
    for layer in range(LAYERS):
        took += seconds(lambda layer=layer: run(layer, layer))
        hooks += seconds(lambda layer=layer: hooked(model, ids, layer, layer))
    return {name: hooks / took}


def cell(tool: str) -> None:
    """Prints the figures of one tool as JSON."""
    model, ids = make()
    hooked(model, ids, 0, 0)
    print(json.dumps(peer(tool, model, ids) if tool in PEERS else own(model, ids)))


def table(with_peers: bool) -> str:
    from benchmarks.run import measure

    figures: dict[str, float] = {}
    for tool in ("labelled", *(PEERS if with_peers else ())):
        found = measure(tool, script="benchmarks.interventions", timeout=900)
        figures |= found if isinstance(found, dict) else {}
    rows = [f"| {NAMES[name]} | {value:.2f}× |" for name, value in figures.items()]
    head = ["| GPT-2 small, 16 tokens, last token's logits | faster than a pass with a hook |"]
    return "\n".join([*head, "|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-peers", action="store_true", help="only torchlens and hooks")
    parser.add_argument("--write", action="store_true", help="put the table into docs/costs.md")
    options = parser.parse_args()
    text = table(not options.no_peers)
    print(text)
    if options.write:
        page = Path(__file__).resolve().parent.parent / "docs" / "costs.md"
        whole = page.read_text()
        before, after = whole.index(START) + len(START), whole.index(END)
        page.write_text(f"{whole[:before]}\n{text}\n{whole[after:]}")


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        cell(sys.argv[1])
    else:
        main()
