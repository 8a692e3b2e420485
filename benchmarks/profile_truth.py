"""How true the times of a profile are, against forward hooks made by hand: `make profile-truth`.

The same inputs run with hooks on every module and under the profile, in turns, many times. Of each
module and input the least time over all rounds counts, because other processes on the machine can
only add to a time. The profile's times are those that its table shows: of light steps wherever
there are any. Hooks on the modules inside a module would be in its time, which matters where modules
are as short as those of a MobileNet: so each depth of the model has its hooks in runs of its own.

With `--train`, each step has a backward pass. A module's backward pass lasts from when the gradient
of its output arrives until that of its input is there (hooks on these tensors, in runs of their
own). Modules whose input needs no gradient cannot be compared so; the whole pass can.

On a machine that others use, `--cpu` reads the time that the processor spent on this thread.
"""

import argparse
import gc
import itertools
import statistics
import sys
import types
from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import nn

import torchlens
from benchmarks.zoo.libraries import import_timm, import_torchvision, import_transformers
from torchlens._capture.current import CURRENT

# So many that some are timed that do not follow a logged one.
NUM_STEPS = 8
# Shorter modules are not compared.
LEAST_SECONDS = 0.5e-3
OPTIONS: dict[str, dict[str, Any]] = {
    "module": {"level": "module"},
    "operation": {"level": "operation"},
    "nonfinite": {"check": "nonfinite"},
    "health": {"check": "health"},
    "health by module": {"check": "health", "level": "module"},
}


class Tiny(nn.Module):
    """Many operations on next to nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(200):
            x = x * 1.01
        return x


class Products(nn.Module):
    """Few operations that take three times as long."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = x @ self.weight
        return x


class Both(nn.Module):
    """One beside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny, self.products = Tiny(), Products()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.tiny(x).sum() + self.products(y).sum()


def tiny_and_products() -> tuple[nn.Module, list[tuple[Any, ...]]]:
    return Both(), [(torch.rand(8), torch.rand(256, 256))] * NUM_STEPS


def resnet() -> tuple[nn.Module, list[tuple[Any, ...]]]:
    return import_torchvision().models.resnet18(), [(torch.rand(1, 3, 112, 112),)] * NUM_STEPS


def gpt2() -> tuple[nn.Module, list[tuple[Any, ...]]]:
    transformers = import_transformers()

    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=4, n_embd=384, n_head=6, vocab_size=4000, use_cache=False)
    )
    return model.eval(), [(torch.randint(4000, (1, 64)),)] * NUM_STEPS


def llama() -> tuple[nn.Module, list[tuple[Any, ...]]]:
    """With another length in each step."""
    transformers = import_transformers()

    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        use_cache=False,
    )
    inputs = [(torch.randint(1000, (1, length)),) for length in range(8, 104, 8)]
    return transformers.LlamaForCausalLM(config).eval(), inputs


def mobilenet() -> tuple[nn.Module, list[tuple[Any, ...]]]:
    return import_torchvision().models.mobilenet_v3_small().eval(), [
        (torch.rand(1, 3, 96, 96),)
    ] * NUM_STEPS


def mixtral() -> tuple[nn.Module, list[tuple[Any, ...]]]:
    """Which experts run depends on the tokens."""
    transformers = import_transformers()

    config = transformers.MixtralConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config).eval(), [
        (torch.randint(1000, (1, 32)),) for _ in range(5)
    ]


class Recurrent(nn.Module):
    """An LSTM in one operation, and one that is stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.cell, self.head = (
            nn.LSTM(64, 128, 2, batch_first=True),
            nn.LSTMCell(128, 128),
            nn.Linear(128, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, _ = self.whole(x)
        state: Any = None
        for value in values.unbind(1):
            state = self.cell(value, state)
        return self.head(state[0])


def recurrent() -> tuple[nn.Module, list[tuple[Any, ...]]]:
    return Recurrent(), [(torch.rand(4, length, 64),) for length in (16, 24, 32)]


def mamba() -> tuple[nn.Module, list[tuple[Any, ...]]]:
    """A loop over the tokens, of a dozen short operations each."""
    transformers = import_transformers()

    config = transformers.MambaConfig(
        vocab_size=1000,
        hidden_size=64,
        state_size=8,
        num_hidden_layers=2,
        conv_kernel=4,
        use_cache=False,
    )
    return transformers.MambaForCausalLM(config).eval(), [
        (torch.randint(1000, (1, 16)),)
    ] * NUM_STEPS


def vit() -> tuple[nn.Module, list[tuple[Any, ...]]]:
    model = import_timm().create_model("vit_tiny_patch16_224", img_size=96, depth=4)
    return model.eval(), [(torch.rand(1, 3, 96, 96),)] * NUM_STEPS


CASES: dict[str, Callable[[], tuple[nn.Module, list[tuple[Any, ...]]]]] = {
    "tiny beside products": tiny_and_products,
    "ResNet-18": resnet,
    "GPT-2": gpt2,
    "Llama, varying lengths": llama,
    "MobileNet": mobilenet,
    "Mixtral": mixtral,
    "LSTM": recurrent,
    "Mamba": mamba,
    "ViT": vit,
}

clock: Callable[[], float] = perf_counter


class CpuClock:
    """The processor time of this thread, less what reading it takes.

    Reading it is a system call, which takes microseconds where a sandbox intercepts it, against
    50 ns for `perf_counter`. The profile reads its clock around every module, hooks by hand only
    around those of one depth: the cost of reading would look like an error of the profile.
    """

    def __init__(self) -> None:
        samples = [thread_time() for _ in range(20_000)]
        self._cost = statistics.quantiles(
            [after - before for before, after in itertools.pairwise(samples)], n=10
        )[0]
        self._spent = 0.0

    def __call__(self) -> float:
        self._spent += self._cost
        return thread_time() - self._spent


def use_cpu_clock() -> None:
    """Makes the hooks and the profile alike read the processor time of the thread."""
    global clock
    torchlens.profile(nn.Identity()).start().finish()  # which imports all that has a clock
    clock = CpuClock()
    for name, module in list(sys.modules.items()):
        if (
            name.startswith("torchlens.")
            and isinstance(module, types.ModuleType)
            and hasattr(module, "perf_counter")
        ):
            module.perf_counter = clock  # type: ignore[attr-defined]
    type(CURRENT).clock = staticmethod(clock)


BACKWARD = "backward of the model"
OF_MODULE = "backward of "


def run(model: nn.Module, args: tuple[Any, ...]) -> float:
    """One step; with gradients also backward, whose seconds it returns."""
    result = model(*args)
    if not torch.is_grad_enabled():
        return 0.0
    loss = getattr(result, "logits", result).sum()
    start = clock()
    loss.backward()
    seconds = clock() - start
    model.zero_grad()
    return seconds


# (address, number of the input) → seconds, in one round
Times = dict[tuple[str, int], float]


def run_with_hooks(model: nn.Module, inputs: list[tuple[Any, ...]], found: Times) -> None:
    """At all depths, one after the other."""
    by_depth: dict[int, list[tuple[str, nn.Module]]] = {}
    for address, module in model.named_modules():
        by_depth.setdefault(len(address.split(".")) if address else 0, []).append((address, module))
    for modules in by_depth.values():
        run_with_hooks_on(modules, model, inputs, found)


def run_with_hooks_on(
    modules: list[tuple[str, nn.Module]],
    model: nn.Module,
    inputs: list[tuple[Any, ...]],
    found: Times,
) -> None:
    started: list[float] = []
    current = [0]
    sums: dict[str, float] = {}

    def before(*_: Any) -> None:
        started.append(clock())

    def after(address: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            sums[address] = sums.get(address, 0.0) + clock() - started.pop()

        return hook

    handles = []
    for address, module in modules:
        handles += [
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after(address)),
        ]
    gc.disable()  # as a logged step does: where it would run is chance
    for current[0], args in enumerate(inputs):
        sums.clear()
        seconds = run(model, args)
        if seconds and "" in sums:
            found[BACKWARD, current[0]] = seconds
        for address, seconds in sums.items():
            found[address, current[0]] = seconds
    gc.enable()
    for handle in handles:
        handle.remove()


def run_with_backward_hooks(model: nn.Module, inputs: list[tuple[Any, ...]], found: Times) -> None:
    started: dict[str, list[float]] = {}
    sums: dict[str, float] = {}
    readers: dict[
        tuple[int, int], list[str]
    ] = {}  # of a tensor as it is at that moment, in this step
    alive: list[torch.Tensor] = []

    def on_input(address: str) -> Callable[..., None]:
        def end(_: torch.Tensor) -> None:
            if started.get(address):
                sums[address] = sums.get(address, 0.0) + clock() - started[address].pop()

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            own = [
                value
                for value in (*args, *kwargs.values())
                if isinstance(value, torch.Tensor) and value.requires_grad
            ]
            # Where another module reads the same, its gradient is there when both are through: that
            # of the first is last.
            if own and all(
                f"{address}.".startswith(f"{other}.")
                for other in readers.setdefault(_state(own), [])
            ):
                readers[_state(own)].append(address)
                alive.append(own[0])
                own[0].register_hook(end)

        return hook

    def on_output(address: str) -> Callable[..., None]:
        def begin(_: torch.Tensor) -> None:
            started.setdefault(address, []).append(clock())

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor) and first.requires_grad:
                first.register_hook(begin)

        return hook

    handles = []
    for address, module in model.named_modules():
        if address:
            handles.append(module.register_forward_pre_hook(on_input(address), with_kwargs=True))
            handles.append(module.register_forward_hook(on_output(address)))
    gc.disable()
    for number, args in enumerate(inputs):
        sums.clear()
        started.clear()
        readers.clear()
        alive.clear()
        run(model, args)
        for address, seconds in sums.items():
            found[f"{OF_MODULE}{address}", number] = seconds
    gc.enable()
    for handle in handles:
        handle.remove()


def _state(tensors: list[torch.Tensor]) -> tuple[int, int]:
    return (id(tensors[0]), tensors[0]._version) if tensors else (0, 0)


def run_profiled(
    model: nn.Module, inputs: list[tuple[Any, ...]], options: dict[str, Any], found: Times
) -> Any:
    with torchlens.profile(model, **options) as profile:
        for args in inputs:
            run(model, args)
    assert not profile.problems, profile.problems
    timed = profile.root.typical_steps.timed
    for number, step in enumerate(profile.steps):
        if step.backward_seconds is not None and step.number in timed:
            found[BACKWARD, number] = step.backward_seconds
    for address, record in profile.modules.items():
        for step_number, seconds in record.by_step("forward_seconds").items():
            if step_number in timed:
                found[address, step_number - 1] = seconds
        for step_number, seconds in record.by_step("backward_seconds").items() if address else ():
            if step_number in timed:
                found[f"{OF_MODULE}{address}", step_number - 1] = seconds
    return profile


def keep_least(found: Times, round_times: Times) -> None:
    """Keeps the least time of each module and input over all rounds."""
    for key, seconds in round_times.items():
        found[key] = min(seconds, found.get(key, seconds))


def means(times: Times, inputs: set[tuple[str, int]]) -> dict[str, float]:
    """Seconds of each module in a step, over the inputs that both have."""
    values: dict[str, list[float]] = {}
    for address, number in inputs:
        values.setdefault(address, []).append(times[address, number])
    return {address: statistics.mean(own) for address, own in values.items()}


def misordered(hooks: dict[str, float], profile: dict[str, float]) -> list[str]:
    """Which of the slowest five, as the profile has it, stand before one that is slower by more
    than a tenth.
    """
    slowest = sorted(hooks, key=lambda address: -profile[address])[:5]
    return [
        f"{first or 'the model'} before {second or 'the model'}"
        for number, first in enumerate(slowest)
        for second in slowest[number + 1 :]
        if hooks[second] > 1.1 * hooks[first]
    ]


def not_adding_up(profile: Any) -> list[str]:
    """Modules whose children are printed with more than they are."""
    return [
        record.address or "the model"
        for record in profile.root.walk()
        for own in [record.typical("forward_seconds")]
        if own is not None
        and sum(child.typical("forward_seconds") or 0.0 for child in record.children)
        > own * (1 + 1e-9)
    ]


def compare(name: str, labels: list[str], rounds: int) -> bool:
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    gc.collect()
    gc.freeze()  # so that reading all that was imported does not take up most of the time
    is_good = True
    for label, options in ((label, OPTIONS[label]) for label in labels):
        hooked: Times = {}
        profiled: Times = {}
        profile = run_profiled(model, inputs, options, {})
        for number in range(rounds):
            for has_hooks in (number % 2 == 0, number % 2 == 1):  # neither always comes first
                found: Times = {}
                gc.collect()
                if not has_hooks:
                    profile = run_profiled(model, inputs, options, found)
                    keep_least(profiled, found)
                    continue
                run_with_hooks(model, inputs, found)
                if torch.is_grad_enabled():
                    gc.collect()
                    run_with_backward_hooks(model, inputs, found)
                keep_least(hooked, found)
        both = set(hooked) & set(profiled)
        truth, shown = means(hooked, both), means(profiled, both)
        ratios = {
            address: shown[address] / seconds
            for address, seconds in truth.items()
            if seconds > LEAST_SECONDS
        }
        backward, is_backward_good = _backward_text(ratios)
        highest, lowest = max(ratios, key=ratios.__getitem__), min(ratios, key=ratios.__getitem__)
        wrong = [
            *misordered({address: truth[address] for address in ratios}, shown),
            *not_adding_up(profile),
        ]
        own = sum(step.own_seconds for step in profile.steps) / len(inputs) / truth[""]
        print(
            f"{name:<24} {label:<17} {len(ratios):3} modules   {ratios[lowest]:.2f} "
            f"({lowest or 'the model'}) to {ratios[highest]:.2f} ({highest or 'the model'})   "
            f"{backward}own {own:.1f}×   {'; '.join(wrong) or 'order right'}",
            flush=True,
        )
        is_good = (
            is_good
            and is_backward_good
            and not wrong
            and ratios[highest] <= 1.3
            and ratios[lowest] >= 1 / 1.3
        )
    return is_good


def _backward_text(ratios: dict[str, float]) -> tuple[str, bool]:
    """Takes the ratios of backward times out: what to print of them, and whether they are good."""
    whole = ratios.pop(BACKWARD, None)
    own = {
        address: ratios.pop(address) for address in list(ratios) if address.startswith(OF_MODULE)
    }
    if whole is None:
        return "", True
    text = f"backward {whole:.2f}"
    if own:
        lowest, highest = min(own, key=own.__getitem__), max(own, key=own.__getitem__)
        low, high = (f"{own[key]:.2f} ({key.removeprefix(OF_MODULE)})" for key in (lowest, highest))
        text += f", of {len(own)} modules {low} to {high}"
    every = [whole, *own.values()]
    return f"{text}   ", max(every) <= 1.3 and min(every) >= 1 / 1.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"parts of names, of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--options", nargs="*", choices=list(OPTIONS), default=list(OPTIONS), help="of the profile"
    )
    parser.add_argument("--train", action="store_true", help="with gradients and backward passes")
    parser.add_argument("--cpu", action="store_true", help="read the time of the processor")
    options = parser.parse_args()
    if options.cpu:
        use_cpu_clock()
    torch.set_num_threads(1)
    torch.set_grad_enabled(options.train)
    wanted = [part.lower() for part in options.cases] or [""]
    chosen = [name for name in CASES if any(part in name.lower() for part in wanted)]
    if not chosen:
        parser.error(f"no case has such a name; there are {', '.join(CASES)}")
    results = [compare(name, options.options, options.rounds) for name in chosen]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
