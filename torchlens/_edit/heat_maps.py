"""Pictures of sweeps: a heat map of keys and parts, or bars."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlens._text.whole_files import whole_file

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


def plot(
    table: "pandas.DataFrame | Any",
    value: str | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
) -> "Figure":
    """As `torchlens.edits.plot`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'torchlens[plot]'") from error
    rows = table.to_pandas() if hasattr(table, "to_pandas") else table
    chosen = _column(rows, value)
    figure = Figure(layout="constrained")
    panels = [("", rows)]
    if "edit" in rows:
        panels = [(str(name), own) for name, own in rows.groupby("edit", sort=False)]
    if rows["part"].nunique() > 1 and rows["key"].nunique() > 1:
        _heat_maps(figure, panels, chosen)
    else:
        _bars(figure, panels, chosen)
    figure.suptitle(title or chosen)
    if path is not None:
        with whole_file(Path(path)) as beside:
            figure.savefig(beside, dpi=120)
    return figure


def _column(rows: "pandas.DataFrame", value: str | None) -> str:
    """The column to draw."""
    for name in ("metric", "estimate") if value is None else (value,):
        if name in rows:
            return name
    numbers = ", ".join(rows.select_dtypes("number").columns)
    raise ValueError(f"value must name a column with numbers: {numbers}. Got {value!r}.")


_Panels = list[tuple[str, "pandas.DataFrame"]]


def _heat_maps(figure: "Figure", panels: _Panels, value: str) -> None:
    """One map for each edit, all in the same colours."""
    first = panels[0][1]
    keys, parts = list(dict.fromkeys(first["key"])), list(dict.fromkeys(first["part"]))
    grids = [
        own.pivot_table(value, "key", "part", sort=False).reindex(index=keys, columns=parts)
        for _, own in panels
    ]
    most = max(float(grid.abs().max().max()) for grid in grids) or 1.0
    is_signed = any(bool((grid < 0).any().any()) for grid in grids)
    shown = range(0, len(parts), 1 + len(parts) // 24)
    every = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, grid, (name, _) in zip(every, grids, panels, strict=True):
        image = axes.imshow(
            grid.to_numpy(), aspect="auto", cmap="RdBu_r" if is_signed else "viridis",
            vmin=-most if is_signed else 0.0, vmax=most,
        )  # fmt: skip
        names = [parts[number].strip("[]") for number in shown]
        axes.set_xticks(shown, names, rotation=60, ha="right")
        axes.set_title(name if len(panels) > 1 else "", fontsize="medium")
    every[0].set_yticks(range(len(keys)), keys)
    width = 1.2 + 0.34 * min(len(parts), 30)
    figure.set_size_inches(max(5, 2 + len(panels) * width), 1.9 + 0.3 * min(len(keys), 40))
    figure.colorbar(image, ax=list(every))


def _bars(figure: "Figure", panels: _Panels, value: str) -> None:
    """Bars for the first edit, marks for the others and for the control."""
    axes = figure.add_subplot()
    first = panels[0][1]
    axes.barh(range(len(first)), first[value], height=0.8, label=panels[0][0] or value)
    marks = [(name, own[value]) for name, own in panels[1:]]
    if "control" in first:
        marks.append(("control", first["control"]))
    for shape, (name, values) in zip("|xo+" * len(marks), marks, strict=False):
        axes.plot(values, range(len(values)), f"k{shape}", markersize=8, label=name)
    if marks:
        figure.legend(loc="outside lower center", ncols=3)
    axes.set_yticks(range(len(first)), first["site"].astype(str))
    axes.invert_yaxis()
    figure.set_size_inches(7, 1.4 + 0.22 * min(len(first), 60))


def overlay(table: "pandas.DataFrame | Any", value: str = "metric") -> dict[str, float]:
    """As `torchlens.edits.overlay`."""
    rows = table.to_pandas() if hasattr(table, "to_pandas") else table
    found = rows.dropna(subset=[value]).groupby("key")[value].agg(lambda own: own.abs().max())
    return {str(key): float(number) for key, number in found.items()}
