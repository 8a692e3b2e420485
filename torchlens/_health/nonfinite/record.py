"""A place where NaN or Inf appeared: text for people, fields for programs."""

from dataclasses import dataclass

from torchlens._health.nonfinite.values import ValueRange


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """An operation whose result has NaN or Inf that its inputs do not account for.

    >>> print(history.first_nonfinite())
    """

    phase: str  # 'forward' or 'backward'
    label: str | None  # the layer; None where there is no log
    operation: str  # the layer type, or in backward the name of autograd's node
    module: str  # the address of the module it ran in, '' for the model itself
    source: str | None  # the user's line
    result: ValueRange
    inputs: tuple[ValueRange, ...]
    step: int | None = None  # of a profile
    note: str = ""  # what else is to be said
    num_unchecked: int = (
        0  # entries that could not be looked at, as they are not saved or have no values
    )
    is_certain: bool = (
        True  # False: minus infinity, of which only the operations could tell whether it is meant
    )
    is_from_outside: bool = (
        False  # a gradient that was not finite when it arrived: the loss made it, or a hook
    )

    @property
    def num_nan(self) -> int:
        return self.result.num_nan

    @property
    def num_inf(self) -> int:
        return self.result.num_inf

    def __str__(self) -> str:
        what = "NaN" if self.num_nan else "Inf"
        name = self.label or self.operation
        kind = f" ({self.operation})" if self.label else ""
        place = f", in module {self.module!r}" if self.module else ", in the model itself"
        made = "it arrived at " if self.is_from_outside else "made by "
        if self.operation in ("input", "buffer"):
            made = kind = ""
            place = f" of {self.module!r}" if self.module else ""
        step = "" if self.step is None else f" of step {self.step}"
        lines = [f"{what} in the {self.phase} pass{step}: {made}{name}{kind}{place}"]
        if self.source:
            lines.append(f"    called at {self.source}")
        lines.append(f"    {self.result}")
        lines += [f"    {each}" for each in self.inputs]
        if self.note:
            lines.append(f"    {self.note}")
        if self.num_unchecked:
            lines.append(
                f"    ({self.num_unchecked} entries are not saved, or have no values, and were not "
                "looked at)"
            )
        return "\n".join(lines)
