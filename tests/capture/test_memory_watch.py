"""A log that saves more than half of the memory that is free says so while there is still some
left.
"""

import re
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.failures import partial_history
from tests.networks import Model
from torchlens._capture.memory import process_memory
from torchlens._capture.memory.process_memory import free_bytes, resident_bytes

MB = 2**20
CPU = torch.device("cpu")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells")


def megabytes(number: float) -> torch.Tensor:
    return torch.ones(int(number * MB) // 4)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that so much is free, and that the process has grown at each operation."""

    def pretend(free: float | None) -> None:
        held = 0

        def hold_more(device: torch.device) -> int:
            nonlocal held
            held += 100 * MB
            return held

        def still_free(device: torch.device) -> int | None:
            return None if free is None else int(free * MB) - 100 * MB  # at the first look

        monkeypatch.setattr(process_memory, "free_bytes", still_free)
        monkeypatch.setattr(process_memory, "held_bytes", hold_more)
        monkeypatch.setattr(process_memory.MemoryWatch, "interval", -1)
        monkeypatch.setattr(process_memory, "_NEGLIGIBLE_BYTES", -1)

    return pretend


def warnings_of(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught if "free" in str(warning.message)]


def chain(length: int) -> Model:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        for _ in range(length):
            x = x * 1.01
        return x.sum()

    return Model(forward)


# -- when it warns
# --------------------------------------------------------------------------------------------------


def test_it_warns_once_and_before_the_memory_is_full(machine: Callable[..., None]) -> None:
    machine(free=10)
    seen: list[int] = []

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = x * 1.01
            seen.append(len(caught))
        return x.sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tl.log_forward_pass(Model(forward), megabytes(1))
    # The input and four products are half of what is free.
    assert seen == [0] * 3 + [1] * 9
    (warning,) = caught
    assert warning.filename == __file__
    assert str(warning.message) == (
        "torchlens: this log has saved 5.0 MB so far, and the model is still running: more than "
        "half of the 10.0 MB that were free when it began. Save less: layers_to_save=[...] with "
        "the layers or modules you need, or 'none' for a log without values. Or make the batch "
        "smaller, or put model and inputs on torch.device('meta') if shapes are enough."
    )


def test_it_points_at_the_line_that_asked_for_the_log(machine: Callable[..., None]) -> None:
    machine(free=10)
    model = nn.Sequential(*(nn.ReLU() for _ in range(12)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tl.log_forward_pass(model, megabytes(1))  # this line
    (warning,) = caught
    assert "# this line" in Path(warning.filename).read_text().splitlines()[warning.lineno - 1]


@pytest.mark.parametrize("free", [None, 30])
def test_it_is_silent_where_there_is_enough_or_nobody_knows(
    machine: Callable[..., None], free: float | None
) -> None:
    machine(free=free)
    assert warnings_of(lambda: tl.log_forward_pass(chain(8), megabytes(1))) == []


def test_memory_that_is_shared_counts_once(machine: Callable[..., None]) -> None:
    machine(free=10)

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for _ in range(50):
            x = x.view(-1)
        return x.expand(100, -1)[0, :3] + 1

    assert warnings_of(lambda: tl.log_forward_pass(Model(forward), megabytes(1))) == []


def test_parameters_that_are_kept_among_the_arguments_live_anyway(
    machine: Callable[..., None],
) -> None:
    machine(free=10)
    model = Model(
        lambda self, x: sum((self.weight[:3] * x) for _ in range(12)),
        weight=nn.Parameter(megabytes(8)),
    )
    assert (
        warnings_of(lambda: tl.log_forward_pass(model, torch.ones(3), save_function_args=True))
        == []
    )


def test_copies_of_what_is_written_in_place_count(machine: Callable[..., None]) -> None:
    machine(free=10)

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for _ in range(12):
            x.mul_(1.01)
        return x.sum()

    assert len(warnings_of(lambda: tl.log_forward_pass(Model(forward), megabytes(1)))) == 1


@pytest.mark.parametrize(
    ("options", "num_warnings"),
    [
        ({}, 1),
        ({"layers_to_save": "none"}, 0),
        ({"layers_to_save": ["fc"]}, 0),
        ({"activation_postfunc": torch.sum}, 0),
        ({"activation_postfunc": lambda tensor: tensor.double()}, 1),
        ({"save_function_args": True}, 1),
        ({"output_device": "meta"}, 0),
    ],
)
def test_what_counts_is_what_is_saved(
    machine: Callable[..., None], options: dict[str, Any], num_warnings: int
) -> None:
    machine(free=10)

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = x * 1.01
        return self.fc(x[:4])

    model = Model(forward, fc=nn.Linear(4, 4))
    assert (
        len(warnings_of(lambda: tl.log_forward_pass(model, megabytes(1), **options)))
        == num_warnings
    )


def test_gradients_are_still_to_come(machine: Callable[..., None]) -> None:
    machine(free=20)
    run = chain(8)
    assert warnings_of(lambda: tl.log_forward_pass(run, megabytes(1))) == []
    (message,) = warnings_of(
        lambda: tl.log_forward_pass(run, megabytes(1).requires_grad_(), save_gradients=True)
    )
    assert "a backward pass will save as much again for the gradients" in message


def test_it_may_be_made_an_error(machine: Callable[..., None]) -> None:
    machine(free=10)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "torchlens: this log")
        with pytest.raises(UserWarning, match="has saved") as raised:
            tl.log_forward_pass(chain(12), megabytes(1))
    assert 5 <= len(partial_history(raised.value)) <= 7
    assert torch._C._len_torch_function_stack() == 0


def test_threads_of_the_model_are_watched_and_warn_once(machine: Callable[..., None]) -> None:
    machine(free=10)

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(2) as pool:
            return torch.stack(list(pool.map(lambda number: chain(8)(x * number), range(3))))

    assert len(warnings_of(lambda: tl.log_forward_pass(Model(forward), megabytes(1)))) == 1


def test_the_size_of_the_process_is_read_first(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is taken out of memory that the process holds already is not taken from what is free."""
    machine(free=10)
    grown = 0
    monkeypatch.setattr(process_memory, "held_bytes", lambda device: grown)
    monkeypatch.setattr(process_memory, "free_bytes", lambda device: 10 * MB)
    assert warnings_of(lambda: tl.log_forward_pass(chain(12), megabytes(1))) == []

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        nonlocal grown
        for _ in range(12):
            grown += MB
            x = x * 1.01
        return x.sum()

    assert len(warnings_of(lambda: tl.log_forward_pass(Model(forward), megabytes(1)))) == 1
    # What grows is not the log.
    assert warnings_of(lambda: tl.log_forward_pass(Model(forward), torch.ones(1))) == []


# -- what the system says
# ----------------------------------------------------------------------------------------------


@needs_linux
def test_free_memory_is_what_the_system_says() -> None:
    text = Path("/proc/meminfo").read_text()
    total = int(re.findall(r"MemTotal:\s+(\d+) kB", text)[0]) * 1024
    free = free_bytes(CPU)
    assert free is not None
    assert 0 < free < total
    assert free_bytes(torch.device("meta")) is None


def test_free_memory_of_a_device_is_what_it_and_torch_have_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Device:
        mem_get_info = staticmethod(lambda device: (1000, 5000))
        memory_reserved = staticmethod(lambda device: 300)
        memory_allocated = staticmethod(lambda device: 100)

    monkeypatch.setattr(
        torch, "get_device_module", lambda device: Device if device.type == "cuda" else torch.mps
    )
    assert free_bytes(torch.device("cuda:1")) == 1200
    assert free_bytes(torch.device("mps")) is None


@needs_linux
def test_the_process_grows_by_what_it_writes() -> None:
    before = resident_bytes()
    tensor = torch.ones(64 * MB, dtype=torch.uint8)
    after = resident_bytes()
    assert before is not None
    assert after is not None
    assert 60 * MB < after - before < 80 * MB
    assert tensor.numel() == 64 * MB


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_limits_of_containers(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"

    def left() -> list[int]:
        return list(process_memory._left_by_groups(proc, groups))

    assert left() == []  # no such system
    write(proc / "self", cgroup="0::/user/app")
    assert left() == []  # no such folder: a container that does not see it
    write(groups / "user" / "app", memory__max="max", memory__current=70)
    assert left() == []
    write(
        groups / "user",
        memory__max=200,
        memory__current=90,
        memory__stat="anon 50\ninactive_file 30\n",
    )
    assert left() == [140]  # of the group around it
    write(groups / "user" / "app", memory__max=100)
    assert left() == [30, 140]
    write(groups, memory__max=50, memory__current=80)
    assert left() == [30, 140, 0]


@needs_linux
@pytest.mark.slow
def test_a_real_log_is_warned_of_as_its_process_grows() -> None:
    """Nothing but the number of what is free is made up here."""
    program = """
        import warnings
        import torch
        from torchlens._capture.memory import process_memory
        import torchlens as tl

        process_memory.free_bytes = lambda device: 600 * 2**20
        caught = []
        warnings.showwarning = lambda message, *rest: caught.append(str(message))
        seen = []

        class Chain(torch.nn.Module):
            def forward(self, x):
                for _ in range(30):
                    x = x * 1.01
                    seen.append(len(caught))
                return x

        history = tl.log_forward_pass(Chain(), torch.ones(4 * 2**20))
        print(seen.count(0), len(caught))
        del history
        caught.clear()
        tl.log_forward_pass(Chain(), torch.ones(2**18))
        print(len(caught))
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    (before, num_warnings), (num_later,) = (
        map(int, line.split()) for line in found.stdout.splitlines()
    )
    assert (
        15 <= before <= 25
    )  # of 30, at 16 MB each; half of what is free are 18.75, or some more that was taken before
    assert (num_warnings, num_later) == (1, 0)


def test_validation_and_other_threads_go_on(machine: Callable[..., None]) -> None:
    machine(free=10)
    found: list[bool] = []

    def run() -> None:
        found.append(tl.validate_saved_activations(chain(3), torch.ones(4)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [True]
