"""Finding a shape bug: what a log shows when the model raises.

Run `python examples/find_shape_bug.py`. A small U-Net works for images whose sides are divisible by
four. For others its decoder comes out a pixel short, and torch's message does not say where. The
log does: the exception carries a note that names the module, the operation, the shapes and the
line, and the log up to that point, in which you can look for the cause.
"""

import torch
from torch import nn
from torch.nn import functional as F

import torchlens as tl


class Stage(nn.Module):
    """Convolution and relu."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(num_in, num_out, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.conv(x))


class Up(nn.Module):
    """Enlarges, joins what the encoder had at that size, and convolves."""

    def __init__(self, num_in: int, num_skip: int, num_out: int) -> None:
        super().__init__()
        self.stage = Stage(num_in + num_skip, num_out)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        x = F.interpolate(x, scale_factor=2)
        return self.stage(torch.cat([x, skip], dim=1))


class FixedUp(Up):
    """The same, enlarging to the size that is needed."""

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        x = F.interpolate(x, size=skip.shape[2:])
        return self.stage(torch.cat([x, skip], dim=1))


class UNet(nn.Module):
    """Two steps down, two steps up."""

    def __init__(self, up: type[Up] = Up) -> None:
        super().__init__()
        self.enc1, self.enc2, self.bottom = Stage(3, 8), Stage(8, 16), Stage(16, 32)
        self.up2, self.up1 = up(32, 16, 16), up(16, 8, 8)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        a = self.enc1(image)
        b = self.enc2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        return self.head(self.up1(self.up2(c, b), a))


def main() -> None:
    """Logs the model on an image it fails on, and reads the log."""
    image = torch.rand(1, 3, 34, 34)
    try:
        tl.log_forward_pass(UNet(), image)
    except RuntimeError as error:
        print("The model's own exception:")
        print(f"    {error}\n")
        print("The note that torchlens added to it:")
        for note in error.__notes__:
            print(f"    {note}\n")
        history = error.partial_history

    print("What was computed until then, with what went in:")
    for entry in history:
        parents = ", ".join(
            f"{parent} {history[parent].tensor_shape}" for parent in entry.parent_layers
        )
        print(
            f"    {entry.layer_label:22} {entry.tensor_shape!s:16} "
            f"{entry.func_applied_name}({parents})"
        )

    odd = next(
        entry
        for entry in history
        if entry.layer_type == "maxpool2d" and history[entry.parent_layers[0]].tensor_shape[-1] % 2
    )
    print(
        f"\nThe cause: {odd.layer_label} halves {history[odd.parent_layers[0]].tensor_shape[-1]} "
        f"to {odd.tensor_shape[-1]},"
    )
    print(f"called at {odd.func_call_stack[0]}; twice that is a pixel short.")

    fixed = tl.log_forward_pass(UNet(FixedUp), image)
    print(
        f"\nEnlarged to the size of the skip instead, it runs: {fixed['output_1'].tensor_shape} "
        f"after {len(fixed)} entries."
    )


if __name__ == "__main__":
    main()
