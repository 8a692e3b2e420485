"""The memory of dropped logs goes back to the system, except for what the next log will use; no
setting of the allocator changes.
"""

import json
import platform
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchlens as tl
from tests.networks import MLP
from torchlens._capture.memory import process_memory
from torchlens._capture.memory.process_memory import FreedMemory
from torchlens._history.log import Log

MB = 2**20
needs_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc keeps so much"
)

# -- when memory is handed back, with an allocator that is made up
# ------------------------------------------------------------------


class Allocator:
    """Keeps everything that is freed until it is trimmed."""

    keepcost = property(lambda self: next(self._ends))

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = self.resident = 1000 * MB
        self.fordblks = 0
        self.num_trims = 0
        self.num_looks = 0
        self._ends = iter(range(10**9))
        monkeypatch.setattr(process_memory, "resident_bytes", lambda: self.resident)

    def mallinfo2(self) -> "Allocator":
        self.num_looks += 1
        return self

    def malloc_trim(self, _: int) -> None:
        self.num_trims += 1
        self.resident = self.used

    def allocate(self, num_bytes: int) -> Callable[[], None]:
        """Takes memory, free memory first; returns a function that frees it."""
        self.used += num_bytes
        self.fordblks = max(0, self.fordblks - num_bytes)
        self.resident = max(self.resident, self.used)
        return lambda: self.release(num_bytes)

    def release(self, num_bytes: int) -> None:
        self.used -= num_bytes
        self.fordblks += num_bytes


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return Allocator(monkeypatch)


def log(memory: FreedMemory, allocator: Allocator, num_bytes: int) -> Callable[[], None]:
    memory.note_use()
    return allocator.allocate(num_bytes)


def test_little_is_kept_for_the_next_log(allocator: Allocator) -> None:
    memory = FreedMemory(allocator)
    for _ in range(50):
        memory.drop(log(memory, allocator, 200 * MB))
    assert allocator.num_trims == 0
    assert allocator.resident == 1200 * MB


def test_much_is_handed_back_each_time(allocator: Allocator) -> None:
    memory = FreedMemory(allocator)
    for number in range(1, 4):
        memory.drop(log(memory, allocator, 800 * MB))
        assert allocator.num_trims == number
        assert allocator.resident == 1000 * MB


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_order_in_which_logs_are_dropped_does_not_matter(
    allocator: Allocator, order: tuple[int, ...]
) -> None:
    memory = FreedMemory(allocator)
    logs = [log(memory, allocator, num_bytes * MB) for num_bytes in (800, 20, 700)]
    for number in order:
        memory.drop(logs[number])
    assert allocator.resident - allocator.used <= 256 * MB


def test_many_logs_leave_no_more_than_one(allocator: Allocator) -> None:
    memory = FreedMemory(allocator)
    for _ in range(100):
        log_frees = log(memory, allocator, 50 * MB)
        allocator.fordblks = 0  # none of it fits the next
        memory.drop(log_frees)
    assert allocator.resident - allocator.used <= 256 * MB


def test_what_was_free_before_the_first_log_is_left_alone(allocator: Allocator) -> None:
    allocator.allocate(4000 * MB)()
    memory = FreedMemory(allocator)
    for _ in range(20):
        memory.drop(log(memory, allocator, 10 * MB))
    assert allocator.num_trims == 0


def test_a_process_that_shrank_is_measured_by_what_it_is_now(allocator: Allocator) -> None:
    allocator.used = allocator.resident = 9000 * MB
    memory = FreedMemory(allocator)
    memory.note_use()
    allocator.used = allocator.resident = 1000 * MB
    memory.drop(log(memory, allocator, 2000 * MB))
    assert allocator.resident == 1000 * MB


def test_a_small_log_does_not_ask_the_allocator(allocator: Allocator) -> None:
    memory = FreedMemory(allocator)
    memory.drop(log(memory, allocator, MB))
    allocator.num_looks = 0
    for _ in range(10):
        memory.drop(log(memory, allocator, MB))
    assert allocator.num_looks == 0


def test_without_glibc_a_log_is_freed_all_the_same() -> None:
    freed = []
    memory = FreedMemory(None)
    memory.note_use()
    memory.drop(lambda: freed.append("it"))
    assert freed == ["it"]


@pytest.mark.parametrize(
    ("name", "value", "is_ours"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072", False),
        ("MALLOC_TOP_PAD_", "131072", False),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072", False),
        ("GLIBC_TUNABLES", "glibc.pthread.rseq=0", True),
    ],
)
@needs_glibc
def test_an_allocator_that_the_user_configured_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, is_ours: bool
) -> None:
    monkeypatch.setenv(name, value)
    assert (process_memory.freed_memory.__wrapped__()._library is not None) == is_ours


def test_on_other_systems_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchlens._capture.memory.process_memory.sys.platform", "darwin")
    assert process_memory.freed_memory.__wrapped__()._library is None


# -- what the system sees
# ----------------------------------------------------------------------------------------------

SCENARIOS = """
    import gc, json, sys, threading, torch, torchlens as tl

    def resident():
        with open("/proc/self/smaps_rollup") as file:
            fields = dict(line.split(":") for line in file if ":" in line and "-" not in line.split(":")[0])
        return int(fields["Rss"].split()[0]) / 1024

    class Wide(torch.nn.Module):
        # Between its large tensors it makes small ones that stay, so that nothing lies free at the
        # end of the heap.
        def __init__(self):
            super().__init__()
            self.scale, self.stays, self.raises = torch.nn.Parameter(torch.ones(1)), [], False

        def forward(self, x):
            for number in range(480):
                x = x * self.scale
                self.stays.append(torch.ones(64))
            if self.raises:
                raise LookupError
            return x

    gc.disable()
    torch.set_num_threads(1)
    model, x = Wide(), torch.ones(1 << 18)  # 1 MB: a log of 480 MB
    log = lambda **options: tl.log_forward_pass(model, x, **options)
    tl.log_forward_pass(torch.nn.Linear(4, 4), torch.ones(2, 4)).layer_labels
    found = {}
    before = resident()
    found["held"] = (history := log()) and resident() - before
    del history
    found["dropped"] = resident() - before
    entry = log()["mul_1_1:1"]
    del entry
    found["an entry dropped"] = resident() - before
    first, second = log(), log()
    del first
    found["the older of two dropped"] = resident() - before - found["held"]
    second = log()
    found["dropped by the next"] = resident() - before - found["held"]
    second.cleanup()
    found["cleaned up"] = resident() - before
    del second
    history = log(save_gradients=True)
    history["output_1"].tensor_contents.sum().backward()
    del history
    found["dropped with gradients"] = resident() - before
    history = log(layers_to_save="none")
    history.save_new_activations(model, x)
    history.save_new_activations(model, x)
    found["saved anew twice"] = resident() - before - found["held"]
    del history
    model.raises = True
    try:
        log()
    except LookupError as error:
        found["its partial log held"] = resident() - before
    found["failed"] = resident() - before
    model.raises = False
    threads = [threading.Thread(target=log) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found["dropped in other threads"] = resident() - before
    print(json.dumps(found))
"""


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@needs_glibc
def test_the_system_sees_memory_come_back() -> None:
    found: dict[str, float] = json.loads(run(SCENARIOS))
    assert found.pop("held") > 420
    assert found.pop("its partial log held") > 420
    assert {scenario: above for scenario, above in found.items() if above > 340} == {}
    assert len(found) == 9


@pytest.mark.soak
@needs_glibc
def test_a_validation_leaves_no_memory_behind() -> None:
    code = (
        SCENARIOS.partition("found = {}")[0]
        + """
    model.forward = lambda x: torch.nn.Sequential(*[torch.nn.Threshold(0, 1)] * 150)(x)
    before = resident()
    assert all(tl.validate_saved_activations(model, x) for _ in range(2))
    print(resident() - before)
    """
    )
    assert float(run(code)) < 400


LOGS_OF_100_MB = """
    import resource, torch, torchlens as tl

    class M(torch.nn.Module):
        def forward(self, x):
            self.stays = [torch.ones(64)]
            for _ in range(100):
                x = x + 1
                self.stays.append(torch.ones(64))
            return x

    torch.set_num_threads(1)
    x = torch.zeros(1 << 18)
    model = M()
    tl.log_forward_pass(model, x)
    tl.log_forward_pass(model, x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tl.log_forward_pass(model, x)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.soak
@needs_glibc
def test_a_small_log_writes_to_the_memory_of_the_last() -> None:
    """Counts the pages that a log got from the system, of the 25,600 that it wrote to."""
    assert int(run(LOGS_OF_100_MB)) < 10_000


THRESHOLDS = """
    import ctypes, sys, torch, torchlens as tl
    from torchlens._capture.memory.process_memory import MallocInfo

    if {logs}:
        tl.log_forward_pass(torch.nn.Linear(4, 4), torch.ones(2, 4))
        tl.validate_saved_activations(torch.nn.Linear(4, 4), torch.ones(2, 4))
    library = ctypes.CDLL(None)
    library.mallinfo2.restype, library.malloc.restype = MallocInfo, ctypes.c_void_p
    for size in (24 << 20, 24 << 20, 16 << 20):
        before = library.mallinfo2().hblks
        block = ctypes.c_void_p(library.malloc(ctypes.c_size_t(size)))
        print("of its own" if library.mallinfo2().hblks > before else "in the heap")
        library.free(block)
"""


@pytest.mark.soak
@needs_glibc
def test_the_allocator_adapts_to_the_program_as_it_does_without_a_log() -> None:
    """Told any of its thresholds, glibc stops to adapt them: that cannot be taken back."""
    assert run(THRESHOLDS.format(logs=False)) == "of its own\nin the heap\nin the heap\n"
    assert run(THRESHOLDS.format(logs=True)) == run(THRESHOLDS.format(logs=False))


REUSED = """
    import gc, json, resource, torch, torchlens as tl
    from torchlens._capture.memory.process_memory import resident_bytes

    def num_faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    torch.set_num_threads(1)
    x = torch.zeros(2**19)  # 2 MB
    model = torch.nn.Sequential(*[torch.nn.Threshold(0, 1) for _ in range(32)])
    with torch.no_grad():
        model(x)
        before = resident_bytes()
        faults = []
        for _ in range(4):
            start = num_faults()
            history = tl.log_forward_pass(model, x)
            faults.append(num_faults() - start)
            del history
        kept = resident_bytes() - before
    print(json.dumps({"faults": faults, "kept": kept}))
"""


@pytest.mark.slow
@needs_glibc
def test_a_log_reuses_the_memory_of_the_one_before_it() -> None:
    found = json.loads(run(REUSED))
    first, *_, last = found["faults"]
    assert first > 16_000 * 0.9  # 64 MB in pages of 4 KB
    assert last < first / 10
    assert 32 * MB < found["kept"] < 256 * MB


@pytest.mark.slow
def test_a_history_that_lives_until_the_process_ends_is_freed_quietly() -> None:
    code = (
        "import torch, torchlens as tl; history = tl.log_forward_pass(torch.nn.Linear(4, 4), "
        "torch.ones(2, 4))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# -- interrupts
# --------------------------------------------------------------------------------------------------


def test_a_log_that_an_interrupt_left_half_made_is_freed_quietly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    object.__new__(Log)  # and gone
    assert said == []


def test_an_interrupt_while_a_log_is_freed_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    class Struck(FreedMemory):
        def drop(self, free: Callable[[], object]) -> None:
            free()
            raise KeyboardInterrupt

    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    monkeypatch.setattr("torchlens._history.log.freed_memory", lambda: Struck(None))

    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - that it comes later is the point
        del history
        monkeypatch.undo()
        for _ in range(100_000):
            time.sleep(0.001)
