"""Nothing of a monitor may be left in torch, or in the process, after any test."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch.optim import optimizer

from torchlens._capture.current import CURRENT


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = torch.nn.Module._call_impl.__code__
    yield
    assert torch.nn.Module._call_impl.__code__ is before
    assert CURRENT.watcher is None
    assert CURRENT.tracker is None
    assert not optimizer._global_optimizer_pre_hooks
    assert not optimizer._global_optimizer_post_hooks
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torchlens")]
