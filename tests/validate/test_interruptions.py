"""What ends a validation from outside comes through; what the model raises is a finding."""

import asyncio
import importlib
import signal

import pytest
import torch

import torchlens as tl
from tests.networks import Model


class Alarm(Exception):  # noqa: N818 (a program's own name)
    """What a program raises in its own signal handler."""


@pytest.mark.parametrize("num_calls", [1, 2, 3, 4])
@pytest.mark.parametrize("error", [TimeoutError, KeyboardInterrupt, asyncio.CancelledError])
def test_a_timeout_in_any_run_of_the_model_comes_through(
    error: type[BaseException], num_calls: int
) -> None:
    calls = []

    def forward(_, x):
        calls.append(x)
        if len(calls) == num_calls:
            raise error("from outside")
        return x * 2

    with pytest.raises(error, match="from outside"):
        tl.validate_forward_pass(Model(forward), torch.ones(2))
    assert len(calls) == num_calls


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("validate", "check_calls"),
        ("check_replay", "run_again"),
        ("check_dependence", "run_again"),
    ],
)
def test_what_a_signal_handler_raises_in_a_check_comes_through(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strike(number, frame):
        raise Alarm

    before = signal.signal(signal.SIGUSR1, strike)
    monkeypatch.setattr(
        importlib.import_module(f"torchlens._validate.{module}"),
        name,
        lambda *_: signal.raise_signal(signal.SIGUSR1),
    )
    try:
        with pytest.raises(Alarm):
            tl.validate_forward_pass(Model(lambda _, x: x * 2), torch.ones(2))
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("error", [Alarm, MemoryError, SystemExit])
def test_what_the_model_raises_is_a_finding(error: type[BaseException]) -> None:
    def forward(_, x):
        raise error("of the model")

    report = tl.validate_forward_pass(Model(forward), torch.ones(2))
    assert "of the model" in str(report.findings[0])
