"""What logs and traces of JAX cost: `python -m benchmarks.jax_costs [--seconds 5]`; part of `make
bench`.

The two that are compared take turns, and the time of the processor is counted.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import torchlens

WIDTH, LENGTH = 64, 32


class Block(eqx.Module):
    """A block of a transformer."""

    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key, 3)
        self.norms = [eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)]
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=keys[0])
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=keys[1])
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=keys[2])

    def __call__(self, x: Any) -> Any:
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h)
        h = jax.vmap(self.up)(jax.vmap(self.norms[1])(x))
        return x + jax.vmap(self.down)(jax.nn.gelu(h))


def transformer() -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    return eqx.nn.Sequential([eqx.nn.Lambda(Block(key)) for key in keys[:2]]), jax.random.normal(
        keys[2], (LENGTH, WIDTH)
    )


def small_operations() -> tuple[Any, Any]:
    weight = jnp.eye(16)

    def steps(x: Any) -> Any:
        for _ in range(60):
            x = jnp.tanh(x * 1.01 + 0.1) @ weight
        return x

    return steps, jnp.ones((16, 16))


def in_turns(runs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """The medians of each: seconds of the processor, and those of them that this thread takes."""
    for run in (*runs.values(), *runs.values()):
        run()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times["plain"]) < 5:
        for name, run in runs.items():
            start = time.process_time(), time.thread_time()
            result = run()
            times[name].append((time.process_time() - start[0], time.thread_time() - start[1]))
            del result
    return {
        name: [statistics.median(column) for column in zip(*own, strict=True)]
        for name, own in times.items()
    }


def log_against_unjitted(model: Any, x: Any, seconds: float) -> float:
    def plain() -> Any:
        with jax.disable_jit():
            return jax.block_until_ready(model(x))

    found = in_turns(
        {"plain": plain, "logged": lambda: torchlens.log_forward_pass(model, x)}, seconds
    )
    return found["logged"][0] / found["plain"][0]


def tail_against_jit(layers: Any, every: int, seconds: float) -> dict[str, list[float]]:
    """Steps of training the transformer, 16 examples at once, jitted; "raw" only writes as many
    bytes to a file.
    """
    num_steps = max(every, 4)
    model, x = transformer()
    batch = jnp.stack([x] * 16)
    weights, rest = eqx.partition(model, eqx.is_array)

    def loss(weights: Any, batch: Any) -> Any:
        return (jax.vmap(eqx.combine(weights, rest))(batch) ** 2).mean()

    def update(weights: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, batch)
        return jax.tree_util.tree_map(lambda w, g: w - 0.01 * g, weights, gradients), value

    step: Any = jax.jit(update)
    with (
        tempfile.TemporaryDirectory() as folder,
        (Path(folder) / "raw").open("wb", buffering=0) as raw,
    ):
        tail = torchlens.tail(step, Path(folder) / "t", layers, every)
        with tail as tailed:
            writer: Any = tail._writer
            written = []
            for _ in range(every + 1):
                tailed(weights, batch)
                wait_for(writer)
                written.append(writer._shards.num_bytes)
            as_many = bytearray(written[-1] - written[0])  # the first call has the graph, too

            def logged() -> None:
                for _ in range(num_steps):
                    jax.block_until_ready(tailed(weights, batch))
                wait_for(writer)  # what it still has to do is not to be counted as another's

            runs: dict[str, Callable[[], Any]] = {
                "plain": lambda: [
                    jax.block_until_ready(step(weights, batch)) for _ in range(num_steps)
                ],
                "logged": logged,
                "raw": lambda: [raw.write(as_many) for _ in range(num_steps // every)],
            }
            found = in_turns(runs, seconds)
            each = {name: [seconds / num_steps for seconds in own] for name, own in found.items()}
            return each | {"megabytes": [len(as_many) / 1e6]}


def wait_for(writer: Any) -> None:
    """Waits until the last call is written or gathered."""
    if writer._waiting is not None:
        writer._waiting.result()


def report(seconds: float) -> Iterator[tuple[str, str]]:
    """Rows for the table: what, and how much."""
    for name, (model, x) in {
        "a small transformer": transformer(),
        "240 small operations": small_operations(),
    }.items():
        yield (
            f"the log of {name} of JAX against the unjitted run",
            f"{log_against_unjitted(model, x, seconds):.2f}×",
        )
    choices = {
        "two blocks": ["layers.0", "layers.1"],
        "the outputs of all modules": lambda path, module: True,
        "everything": "all",
    }
    for words, layers in choices.items():
        for every in (1, 10):
            found = tail_against_jit(layers, every, seconds)
            (plain, in_plain), (logged, in_logged), raw = (
                found["plain"],
                found["logged"],
                found["raw"][0],
            )
            name = f"`tail` of a jitted training step ({plain * 1e3:.0f} ms), {words}"
            name += f", {found['megabytes'][0]:.1f} MB" + (
                f", `every={every}`" if every > 1 else ""
            )
            much = (
                f"{logged / plain:.2f}×; a raw write of as many bytes alone takes "
                f"{raw / plain:.2f}×"
            )
            yield (
                name,
                (
                    f"{much}; {(in_logged - in_plain) * 1e3:+.1f} ms a step in the training's own "
                    "thread"
                ),
            )


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    for what, much in report(parser.parse_args().seconds):
        print(f"| {what} | {much} |", flush=True)


if __name__ == "__main__":
    main()
