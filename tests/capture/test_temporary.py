"""Promise 2: torch is patched during the call only."""

import gc
import signal
import subprocess
import sys
import textwrap
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchlens as tl
from tests.networks import MLP, ConvNet, Model
from torchlens._capture.current import CURRENT

NAMESPACES = [
    torch, torch.Tensor, torch._C.TensorBase, torch.nn.functional, torch._tensor, torch.functional,
    torch.overrides,
    torch.nn.Module, torch.nn.init, torch.linalg, torch.fft, torch.special, torch.sparse,
    torch.nested, torch._C._nn,
    torch.autograd.Function, torch.autograd.function._SingleLevelFunction, torch.jit,
    torch._functorch.apis, torch._functorch.eager_transforms, torch.utils.dlpack, torch.func,
    torch.nn.Parameter,
    torch._C.ScriptFunction, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
    torch.nn.modules.module,
]  # fmt: skip


def snapshot() -> list[dict[str, Any]]:
    return [names(space) for space in NAMESPACES]


def names(space: Any) -> dict[str, Any]:
    """What stands in a namespace, and what stands in its functions."""
    own = dict(vars(space))
    return own | {
        f"{name}.__code__": value.__code__
        for name, value in own.items()
        if isinstance(value, FunctionType)
    }


def is_ours(value: Any) -> bool:
    return str(getattr(getattr(value, "__func__", value), "__module__", "")).startswith("torchlens")


def assert_untouched(before: list[dict[str, Any]]) -> None:
    for space, old in zip(NAMESPACES, before, strict=True):
        new = names(space)
        assert list(new) == list(old), space
        changed = [name for name in old if new[name] is not old[name]]
        assert changed == [], space
        # A log before this one may have left something behind, too.
        assert [name for name, value in new.items() if is_ours(value)] == [], space
    assert torch._C._len_torch_function_stack() == 0
    assert CURRENT.tracker is None


class OwnError(Exception):
    pass


def raising(error: BaseException) -> Model:
    def forward(self: Model, x: torch.Tensor) -> Any:
        y = self.fc(x)
        if y is not None:
            raise error
        return y

    return Model(forward, fc=nn.Linear(4, 4))


def warm_up() -> None:
    """The first call of some torch functions sets module attributes of torch's own."""
    tl.log_forward_pass(ConvNet(), torch.rand(2, 3, 8, 8), save_gradients=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"save_gradients": True}, {"layers_to_save": "relu"}, {"save_function_args": True}],
)
def test_after_the_call_every_name_in_torch_is_the_same_object(options: dict[str, Any]) -> None:
    warm_up()
    before = snapshot()
    tl.log_forward_pass(ConvNet(), torch.rand(2, 3, 8, 8), **options)
    assert_untouched(before)


@pytest.mark.parametrize(
    "error", [OwnError(), KeyboardInterrupt(), SystemExit(), GeneratorExit(), StopIteration()]
)
def test_after_an_exception_every_name_in_torch_is_the_same_object(error: BaseException) -> None:
    warm_up()
    before = snapshot()
    model = raising(error)
    with pytest.raises(type(error)) as caught:
        tl.log_forward_pass(model, torch.rand(2, 4))
    assert caught.value is error
    assert_untouched(before)
    assert vars(model).keys() == vars(raising(error)).keys()


def test_after_ctrl_c_at_any_moment_every_name_in_torch_is_the_same_object() -> None:
    is_struck = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal is_struck
        is_struck = True
        raise KeyboardInterrupt

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        while not is_struck:
            x = self.fc(F.relu(x, inplace=True)) + 1
        raise KeyboardInterrupt  # the one that came struck a finalizer, and Python drops those

    warm_up()
    before = snapshot()
    model = Model(forward, fc=nn.Linear(4, 4))
    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(15):
            is_struck = False
            with pytest.raises(KeyboardInterrupt), torch.no_grad():  # noqa: PT012 - it may strike as soon as it is armed
                signal.setitimer(signal.ITIMER_REAL, 0.003 + 0.0007 * number)
                tl.log_forward_pass(model, torch.rand(2, 4))
            assert_untouched(before)
    finally:
        signal.signal(
            signal.SIGALRM, signal.SIG_IGN
        )  # what is still on its way must not end the session
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_the_model_has_no_attribute_or_hook_of_ours() -> None:
    model = MLP()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    tl.log_forward_pass(model, torch.rand(2, 4), save_gradients=True)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
        assert "forward" not in vars(module)


def test_the_garbage_collector_is_as_before() -> None:
    tl.log_forward_pass(MLP(), torch.rand(2, 4))
    assert gc.isenabled()
    gc.disable()
    try:
        tl.log_forward_pass(MLP(), torch.rand(2, 4))
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(OwnError):
        tl.log_forward_pass(raising(OwnError()), torch.rand(2, 4))
    assert gc.isenabled()


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_first_log_of_a_process_leaves_every_name_in_torch_the_same_object() -> None:
    out = run("""
        import torch
        spaces = [torch, torch.Tensor, torch.nn.functional, torch._tensor, torch.functional, torch.overrides,
                  torch.nn.Module, torch.nn.init, torch.linalg, torch.fft, torch.special, torch._C.ScriptFunction]
        spaces.append(torch.nn.modules.module)
        def names(space):
            own = dict(vars(space))
            return own | {name + ".code": value.__code__ for name, value in own.items() if hasattr(value, "__code__")}
        before = [names(space) for space in spaces]
        import torchlens as tl
        class M(torch.nn.Module):
            def forward(self, x):
                x = torch.nn.functional.relu(x) / 2
                x += 1
                return x @ x.T
        for saved in ("all", "iadd", "none"):
            tl.log_forward_pass(M(), torch.rand(3, 3), layers_to_save=saved)
        for space, old in zip(spaces, before):
            new = names(space)
            changed = [name for name in old if new.get(name) is not old[name]] + [name for name in new if "lens" in name]
            if changed:
                print(space, changed)
    """)
    assert out == ""


@pytest.mark.slow
def test_a_model_may_bring_in_the_compiler_and_other_modules_which_keep_nothing_of_ours() -> None:
    out = run("""
        import sys, warnings
        warnings.simplefilter("ignore")
        import torch, torchlens as tl
        compile = torch.compile
        class M(torch.nn.Module):
            def forward(self, x):
                import torch.utils.checkpoint, torch.distributions, torch.masked, torch.fx.experimental, torch._dynamo
                import torch.nn.utils.parametrize, torch.ao.nn.quantized, torch.signal.windows, torch.export
                from torch.nn.attention.flex_attention import flex_attention  # compiles itself when called
                return flex_attention(x, x, x)
        x = torch.rand(1, 2, 16, 8)
        history = tl.log_forward_pass(M(), x)
        def ours(value):
            return callable(value) and str(getattr(value, "__module__", "")).startswith("torchlens")
        for name, module in sorted(sys.modules.items()):
            if name.startswith("torch") and not name.startswith("torchlens"):
                found = [key for key, value in vars(module).items() if ours(value)]
                if found:
                    print(name, found)
        print("matmul_1" in history, torch.compile is compile, torch.allclose(M()(x), history["output_1"].tensor_contents))
        print(torch.compile(torch.sin, backend="eager")(x).shape, torch._dynamo.eval_frame._stance.stance)
    """)
    assert out.splitlines() == ["True True True", "torch.Size([1, 2, 16, 8]) default"]


def test_an_interrupt_while_torch_hands_over_a_call_does_not_bring_the_mode_back_later() -> None:
    class Interrupted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # What torch does around a Python method of a tensor; the interrupt comes before it is
            # undone.
            self.handing_over = torch.overrides._pop_mode_temporarily()
            self.handing_over.__enter__()
            raise KeyboardInterrupt

    model = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        tl.log_forward_pass(model, torch.rand(2))
    del model.handing_over
    assert torch._C._len_torch_function_stack() == 0
