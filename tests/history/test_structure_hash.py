"""structure_hash: equal for models that do the same, different for any that do not."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchlens as tl
from tests.networks import MLP, Model
from torchlens._history.structure_hash import structure_lines

X = torch.rand(2, 4, 8, 8)


def hash_of(model: nn.Module, x: Any = X, **options: Any) -> str:
    return tl.log_forward_pass(model, x, **options).structure_hash


class Base(nn.Module):
    """Two branches, a residual, a buffer, a tied weight, and an output dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.left = nn.Conv2d(4, 4, 1)
        self.right = nn.Conv2d(4, 4, 1)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(4, 5)
        self.back = nn.Linear(5, 4, bias=False)
        self.back.weight = nn.Parameter(torch.rand(4, 5))
        self.register_buffer("scale", torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.norm(self.conv(x)))
        y = self.left(y) - self.right(y)
        y = self.drop(y * self.scale) + x
        y = self.head(y.mean((2, 3)))
        return {"logits": y, "hidden": self.back(y)}


def base() -> Base:
    return Base().eval()


def with_forward(forward: Callable[[Any, Tensor], Any]) -> nn.Module:
    kind = type("Other", (Base,), {"forward": forward})
    made: nn.Module = kind().eval()
    return made


def with_parts(**parts: Any) -> nn.Module:
    model = base()
    for name, part in parts.items():
        setattr(model, name, part)
    return model.eval()


def other_kernel() -> nn.Module:
    return with_parts(conv=nn.Conv2d(4, 4, 5, padding=2))


def other_activation() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Any:
        y = F.gelu(self.norm(self.conv(x)))
        y = self.left(y) - self.right(y)
        y = self.drop(y * self.scale) + x
        y = self.head(y.mean((2, 3)))
        return {"logits": y, "hidden": self.back(y)}

    return with_forward(forward)


def branches_exchanged() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Any:
        y = F.relu(self.norm(self.conv(x)))
        y = self.right(y) - self.left(y)
        y = self.drop(y * self.scale) + x
        y = self.head(y.mean((2, 3)))
        return {"logits": y, "hidden": self.back(y)}

    return with_forward(forward)


def branches_in_another_order() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Any:
        y = F.relu(self.norm(self.conv(x)))
        right = self.right(y)
        y = self.left(y) - right
        y = self.drop(y * self.scale) + x
        y = self.head(y.mean((2, 3)))
        return {"logits": y, "hidden": self.back(y)}

    return with_forward(forward)


def operands_exchanged() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Any:
        y = F.relu(self.norm(self.conv(x)))
        left, right = self.left(y), self.right(y)
        y = right - left
        y = self.drop(y * self.scale) + x
        y = self.head(y.mean((2, 3)))
        return {"logits": y, "hidden": self.back(y)}

    return with_forward(forward)


def residual_added() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Any:
        y = F.relu(self.norm(self.conv(x))) + x
        y = self.left(y) - self.right(y)
        y = self.drop(y * self.scale) + x
        y = self.head(y.mean((2, 3)))
        return {"logits": y, "hidden": self.back(y)}

    return with_forward(forward)


def residual_from_elsewhere() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Any:
        z = F.relu(self.norm(self.conv(x)))
        y = self.left(z) - self.right(z)
        y = self.drop(y * self.scale) + z
        y = self.head(y.mean((2, 3)))
        return {"logits": y, "hidden": self.back(y)}

    return with_forward(forward)


def other_dimensions() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Any:
        y = F.relu(self.norm(self.conv(x)))
        y = self.left(y) - self.right(y)
        y = self.drop(y * self.scale) + x
        y = self.head(y.mean((2, 3), keepdim=True)[:, :, 0, 0])
        return {"logits": y, "hidden": self.back(y)}

    return with_forward(forward)


def other_output_names() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Any:
        y = F.relu(self.norm(self.conv(x)))
        y = self.left(y) - self.right(y)
        y = self.drop(y * self.scale) + x
        y = self.head(y.mean((2, 3)))
        return {"scores": y, "hidden": self.back(y)}

    return with_forward(forward)


def outputs_exchanged() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Any:
        out = Base.forward(self, x)
        return {"hidden": out["hidden"], "logits": out["logits"]}

    return with_forward(forward)


def weights_tied() -> nn.Module:
    model = base()
    model.right.weight = model.left.weight
    return model


def parameter_shape() -> nn.Module:
    return with_parts(head=nn.Linear(4, 6), back=nn.Linear(6, 4, bias=False))


def unused_parameter() -> nn.Module:
    return with_parts(unused=nn.Linear(2, 2))


def buffer_of_another_shape() -> nn.Module:
    model = base()
    model.scale = torch.ones(1, 1, 1)
    return model


CHANGES: dict[str, Callable[[], nn.Module]] = {
    "kernel": other_kernel,
    "stride": lambda: with_parts(conv=nn.Conv2d(4, 4, 3, padding=1, stride=1, dilation=1, groups=2)),
    "padding mode": lambda: with_parts(conv=nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")),
    "bias": lambda: with_parts(left=nn.Conv2d(4, 4, 1, bias=False)),
    "epsilon": lambda: with_parts(norm=nn.BatchNorm2d(4, eps=1e-3)),
    "norm": lambda: with_parts(norm=nn.GroupNorm(2, 4)),
    "groups of a norm": lambda: with_parts(norm=nn.GroupNorm(4, 4)),
    "norm left out": lambda: with_parts(norm=nn.Identity()),
    "dropout rate": lambda: with_parts(drop=nn.Dropout(0.2)),
    "training": lambda: base().train(),
    "dtype": lambda: base().double(),
    "activation": other_activation,
    "order of branches": branches_in_another_order,
    "branches": branches_exchanged,
    "operands": operands_exchanged,
    "residual": residual_added,
    "source of the residual": residual_from_elsewhere,
    "dimensions": other_dimensions,
    "names of outputs": other_output_names,
    "order of outputs": outputs_exchanged,
    "tied weights": weights_tied,
    "shape of a parameter": parameter_shape,
    "unused parameter": unused_parameter,
    "shape of a buffer": buffer_of_another_shape,
    "wrapper": lambda: nn.Sequential(base()),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_of_what_a_model_does_changes_the_hash(name: str) -> None:
    x = X.double() if name == "dtype" else X
    assert hash_of(CHANGES[name](), x) != hash_of(base())


def test_each_change_has_a_hash_of_its_own() -> None:
    found = {
        name: hash_of(make(), X.double() if name == "dtype" else X)
        for name, make in CHANGES.items()
    }
    same = [(a, b) for a in found for b in found if a < b and found[a] == found[b]]
    assert same == []


def other_weights() -> nn.Module:
    torch.manual_seed(7)
    return base()


def other_variable_names() -> nn.Module:
    def forward(self: Any, image: Tensor) -> Any:
        features = F.relu(self.norm(self.conv(image)))
        difference = self.left(features) - self.right(features)
        total = self.drop(difference * self.scale) + image
        scores = self.head(total.mean((2, 3)))
        return {"logits": scores, "hidden": self.back(scores)}

    return with_forward(forward)


def arguments_by_name() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Any:
        y = F.relu(input=self.norm(self.conv(x)))
        y = self.left(y) - self.right(y)
        y = self.drop(y * self.scale) + x
        y = y.mean(dim=(2, 3), keepdim=False)
        y = (
            F.linear(bias=self.head.bias, weight=self.head.weight, input=y)
            if False
            else self.head(y)
        )
        return (
            {"hidden": self.back(y), "logits": y}
            if False
            else {"logits": y, "hidden": self.back(y)}
        )

    return with_forward(forward)


class SubclassedReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)


def frozen() -> nn.Module:
    return base().requires_grad_(False)


SAME: dict[str, Callable[[], nn.Module]] = {
    "weights": other_weights,
    "variables": other_variable_names,
    "arguments by name": arguments_by_name,
    "frozen": frozen,
    "class": lambda: with_forward(Base.forward),
    "compiled": lambda: torch.compile(base(), backend="eager"),  # type: ignore[dict-item, return-value]
}


@pytest.mark.parametrize("name", SAME)
def test_what_is_no_change_of_what_a_model_does_leaves_the_hash(name: str) -> None:
    assert hash_of(SAME[name]()) == hash_of(base())


def test_the_options_of_a_log_leave_the_hash() -> None:
    expected = hash_of(base())
    assert hash_of(base(), layers_to_save="none") == expected
    assert hash_of(base(), layers_to_save=["relu"], keep_unsaved_layers=False) == expected
    assert hash_of(base(), save_function_args=True, detach_saved_tensors=True) == expected
    assert hash_of(base(), activation_postfunc=lambda t: t.sum()) == expected
    with torch.no_grad():
        assert hash_of(base()) == expected


def test_inputs_of_other_values_leave_the_hash_and_other_sizes_change_it() -> None:
    expected = hash_of(base())
    assert hash_of(base(), torch.zeros_like(X)) == expected
    assert hash_of(base(), torch.rand(3, 4, 8, 8)) != expected
    assert hash_of(base(), torch.rand(2, 4, 16, 16)) != expected


def test_the_device_leaves_the_hash() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        here = x.device
        return self.fc(x) + torch.ones(5, device=here) + torch.zeros(5, device=str(here))

    plain = Model(forward, fc=nn.Linear(4, 5))
    meta = Model(forward, fc=nn.Linear(4, 5, device="meta"))
    assert hash_of(meta, torch.empty(2, 4, device="meta")) == hash_of(plain, torch.rand(2, 4))


def test_a_copy_and_a_file_have_the_hash_of_their_history(tmp_path: Path) -> None:
    import copy
    import pickle

    history = tl.log_forward_pass(base(), X)
    history.save(tmp_path / "a.safetensors")
    for other in (
        copy.deepcopy(history),
        pickle.loads(pickle.dumps(history)),
        tl.load(tmp_path / "a.safetensors"),
    ):
        assert other.structure_hash == history.structure_hash


PROGRAM = """
import sys, torch, torchlens as tl
from tests.history.test_structure_hash import base
torch.manual_seed(int(sys.argv[1]))
print(tl.log_forward_pass(base(), torch.rand(2, 4, 8, 8)).structure_hash)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["4242", pytest.param("0", marks=[pytest.mark.soak])])
def test_the_hash_is_the_same_in_every_process(seed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, seed],
        capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.stdout.strip() == hash_of(base())


def test_the_lines_say_what_the_hash_is_of() -> None:
    lines = structure_lines(tl.log_forward_pass(MLP(), torch.rand(2, 4))._log)
    assert lines == [
        "parameter fc1.weight 5×4 float32",
        "parameter fc1.bias 5 float32",
        "parameter fc2.weight 3×5 float32",
        "parameter fc2.bias 3 float32",
        "0 input 2×4 float32",
        "1 linear(0:#0, 1:fc1.weight, 2:fc1.bias) 2×5 float32 fc1:1",
        "2 relu(0:#1) 2×5 float32 act:1",
        "3 linear(0:#2, 1:fc2.weight, 2:fc2.bias) 2×3 float32 fc2:1",
        "4 output #3 2×3 float32",
    ]
