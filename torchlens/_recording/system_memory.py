"""How much memory there is: what this process holds, and what is free for it, as the system sees
it.
"""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Where a control group says its limit, what it uses, and what of that is file cache that the system
# would give up.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_NO_LIMIT = 2**60  # what version 1 says is a little below 2**63


def resident_bytes() -> int | None:
    """The memory that the process holds beside that of files; None where the system does not
    tell.
    """
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:  # no /proc, or no file may be opened any more
        return None
    try:
        _, resident, shared, *_ = os.read(file, 200).split()
    finally:
        os.close(file)
    return (int(resident) - int(shared)) * _page_bytes()


def free_bytes(device: torch.device) -> int | None:
    """What can still be allocated on a device; None where that is not known.

    Of the main memory: what is free or easily freed, and no more than the limits of containers
    (control groups) leave.
    """
    if device.type == "cpu":
        free = [_available(_PROC), *_left_by_groups(_PROC, _CGROUPS)]
        return min((number for number in free if number is not None), default=None)
    if device.type == "meta":
        return None
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    reserved = module.memory_reserved(device) - module.memory_allocated(
        device
    )  # torch's own, and free
    return int(module.mem_get_info(device)[0] + reserved)


@cache
def _page_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE")


def _available(proc: Path) -> int | None:
    return _numbers(proc / "meminfo").get("MemAvailable:", None)


def _left_by_groups(proc: Path, groups: Path) -> Iterator[int]:
    """What each limit leaves that stands on this process: its group's, and those of the groups
    around it.
    """
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds in ("", "memory"):
            root, names = (groups, _VERSION_2) if not kinds else (groups / "memory", _VERSION_1)
            # Inside a container the path may be the one that it has outside, where it is not to be
            # seen.
            inner = root / path.lstrip("/")
            for folder in (inner, *inner.parents):
                if folder.is_relative_to(root):
                    yield from _left_by_group(folder, *names)


def _left_by_group(
    folder: Path, limit_name: str, usage_name: str, cache_name: str
) -> Iterator[int]:
    limit, usage = _text(folder / limit_name).strip(), _text(folder / usage_name).strip()
    if limit.isdigit() and usage.isdigit() and int(limit) < _NO_LIMIT:  # "max" is none, either
        yield max(0, int(limit) - int(usage) + _numbers(folder / "memory.stat").get(cache_name, 0))


def _numbers(file: Path) -> dict[str, int]:
    """Lines of a name and a number, which is of bytes, or of kB if it says so."""
    words = [line.split() for line in _text(file).splitlines()]
    return {
        name: int(number) * (1024 if unit == ["kB"] else 1)
        for name, number, *unit in filter(None, words)
    }


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # not there, or not for us
        return ""
