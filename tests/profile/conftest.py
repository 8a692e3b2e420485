"""What the tests of the profile share: nothing of it may be left in torch after any of them."""

from collections.abc import Iterator

import pytest
import torch
import torch.autograd.profiler as torch_profiler

from torchlens._capture.current import CURRENT

_WATCHED = [
    (torch.nn.Module, "_call_impl"),
    (torch.nn.Module._call_impl, "__code__"),
    (torch.Tensor, "__add__"),
    (torch.overrides, "has_torch_function"),
    (torch.autograd, "_enable_profiler_legacy"),
    (torch_profiler, "_prepare_profiler"),
    (torch_profiler, "_enable_profiler"),
]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = [getattr(owner, name) for owner, name in _WATCHED]
    yield
    assert [getattr(owner, name) for owner, name in _WATCHED] == before
    assert CURRENT.watcher is None
    assert CURRENT.tracker is None
    assert torch._C._len_torch_function_stack() == 0
    assert not torch._C._autograd._profiler_enabled()
