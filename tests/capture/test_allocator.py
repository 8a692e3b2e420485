"""The memory of one log is there for the next, within limits, unless the user has said otherwise."""

import platform
import subprocess
import sys
import textwrap

import pytest

from torchlens.capture import allocator

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told what to keep")

FAULTS = """
    import resource, torch, torchlens as tl

    class M(torch.nn.Module):
        def forward(self, x):
            for _ in range(100):
                x = x + 1
            return x

    x = torch.zeros(1 << 18)  # 1 MB: a log of 100 MB
    tl.log_forward_pass(M(), x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tl.log_forward_pass(M(), x)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> int:
    """How many pages the second of two logs got from the system, of 25,600 that it wrote to."""
    run = [sys.executable, "-c", textwrap.dedent(FAULTS)]
    return int(subprocess.run(run, capture_output=True, text=True, check=True, env=environment).stdout)


@needs_glibc
def test_a_second_log_writes_to_the_memory_of_the_first() -> None:
    assert faults() < 5_000


@needs_glibc
def test_a_setting_of_the_users_own_stays() -> None:
    assert faults(MALLOC_TRIM_THRESHOLD_="131072") > 20_000


@pytest.mark.parametrize(("num_pages", "expected"), [(1 << 18, 64), (1 << 24, 512)])
def test_no_more_is_kept_than_a_share_of_the_machines_memory(
    monkeypatch: pytest.MonkeyPatch, num_pages: int, expected: int
) -> None:
    said: dict[int, int] = {}

    class Library:
        def mallopt(self, parameter: int, value: int) -> None:
            said[parameter] = value

    monkeypatch.setattr(allocator.sys, "platform", "linux")
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: Library())
    monkeypatch.setattr(allocator.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": num_pages}.__getitem__)
    for name in allocator._ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    allocator.keep_freed_memory.__wrapped__()
    assert said == {-1: expected * 2**20, -3: 32 * 2**20}
