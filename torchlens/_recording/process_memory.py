"""The memory of this process: used, available, and tensors read in place.

`tensor.numpy()` would have a side effect: a storage on which it was called, through any tensor, can
never be resized again.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def resident_bytes() -> int | None:
    """The memory that the process holds, without files; None if the system does not report it."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:  # no /proc, or too many open files
        return None
    try:
        _, resident, shared, *_ = os.read(file, 200).split()
    finally:
        os.close(file)
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def held_bytes(device: torch.device) -> int | None:
    """The memory of a device that the process holds, as far as it is cheap to know."""
    if device.type == "cpu":
        return resident_bytes()
    return int(torch.get_device_module(device).memory_allocated(device))


def free_bytes(device: torch.device) -> int | None:
    """The memory that can still be allocated on a device; None if unknown.

    For the CPU: what is free or easily freed, within the limits of containers (control groups).
    """
    if device.type == "cpu":
        free = [_numbers(_PROC / "meminfo").get("MemAvailable:"), *_left_by_groups(_PROC, _CGROUPS)]
        return min((number for number in free if number is not None), default=None)
    module: Any = None if device.type == "meta" else torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    cached = module.memory_reserved(device) - module.memory_allocated(device)  # by torch, and free
    return int(module.mem_get_info(device)[0] + cached)


def _left_by_groups(proc: Path, groups: Path) -> Iterator[int]:
    """What the memory limits of this process's control group, and of those around it, leave.

    Control groups of version 2; on systems with version 1, their limits are not seen.
    """
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controller, path = line.split(":", 2)
        if not controller:  # version 2
            group = groups / path.lstrip("/")
            for parent in (group, *group.parents):
                if parent.is_relative_to(groups):
                    yield from _left_by_group(parent)


def _left_by_group(folder: Path) -> Iterator[int]:
    limit = _text(folder / "memory.max").strip()
    usage = _text(folder / "memory.current").strip()
    if limit.isdigit() and usage.isdigit():  # else "max", or no such file
        cached = _numbers(folder / "memory.stat").get("inactive_file", 0)  # given up when needed
        yield max(0, int(limit) - int(usage) + cached)


def _numbers(file: Path) -> dict[str, int]:
    """Lines of a name and a number, in bytes or in kB."""
    words = [line.split() for line in _text(file).splitlines()]
    return {
        name: int(number) * (1024 if unit == ["kB"] else 1)
        for name, number, *unit in filter(None, words)
    }


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # missing, or not readable for this user
        return ""


# Memory from an address on, as an array longer than any. The caller slices what it needs, and keeps
# the owner of the memory alive.
memory_at: Callable[[int], Any] = (ctypes.c_char * (1 << 46)).from_address
