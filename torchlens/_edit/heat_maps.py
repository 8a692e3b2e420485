"""Pictures of sweeps: a heat map of keys and parts, or bars."""

import os
from typing import TYPE_CHECKING, Any

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
    names = [name for name in ("metric", "estimate") if name in rows]
    chosen = value or next(iter(names), None)
    if chosen is None or chosen not in rows:
        numbers = ", ".join(rows.select_dtypes("number").columns)
        raise ValueError(f"value must name a column with numbers: {numbers}. Got {value!r}.")
    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    if rows["part"].nunique() > 1 and rows["key"].nunique() > 1:
        _heat_map(figure, axes, rows, chosen)
    else:
        _bars(figure, axes, rows, chosen)
    axes.set_title(title or chosen)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _heat_map(figure: "Figure", axes: Any, rows: "pandas.DataFrame", value: str) -> None:
    keys, parts = list(dict.fromkeys(rows["key"])), list(dict.fromkeys(rows["part"]))
    grid = rows.pivot_table(value, "key", "part", sort=False).reindex(index=keys, columns=parts)
    most = float(grid.abs().max().max()) or 1.0
    is_signed = bool((grid < 0).any().any())
    image = axes.imshow(
        grid.to_numpy(), aspect="auto", cmap="RdBu_r" if is_signed else "viridis",
        vmin=-most if is_signed else 0.0, vmax=most,
    )  # fmt: skip
    axes.set_yticks(range(len(keys)), keys)
    shown = range(0, len(parts), 1 + len(parts) // 24)
    axes.set_xticks(shown, [parts[number].strip("[]") for number in shown], rotation=60, ha="right")
    figure.set_size_inches(2.5 + 0.32 * min(len(parts), 30), 1.6 + 0.3 * min(len(keys), 40))
    figure.colorbar(image, ax=axes)


def _bars(figure: "Figure", axes: Any, rows: "pandas.DataFrame", value: str) -> None:
    names = rows["site"].astype(str)
    axes.barh(range(len(rows)), rows[value], height=0.8, label=value)
    if "control" in rows:
        axes.plot(rows["control"], range(len(rows)), "k|", markersize=9, label="control")
        axes.legend()
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    figure.set_size_inches(7, 1.2 + 0.22 * min(len(rows), 60))


def overlay(table: "pandas.DataFrame | Any", value: str = "metric") -> dict[str, float]:
    """As `torchlens.edits.overlay`."""
    rows = table.to_pandas() if hasattr(table, "to_pandas") else table
    found = rows.dropna(subset=[value]).groupby("key")[value].agg(lambda own: own.abs().max())
    return {str(key): float(number) for key, number in found.items()}
