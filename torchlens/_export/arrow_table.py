"""A history as an Arrow table or a Parquet file: the columns of `to_pandas`."""

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchlens._text.error_wording import checked_file
from torchlens._text.whole_files import whole_file

if TYPE_CHECKING:
    import pandas
    import pyarrow


def to_arrow(history: Any) -> "pyarrow.Table":
    """A row for each entry. What Arrow has no type for is text; the schema carries the receipt."""
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Arrow and Parquet need the package pyarrow: pip install 'torchlens[features]'."
        ) from error
    table = history.to_pandas()
    columns = {name: _array(table[name], pyarrow) for name in table.columns}
    receipt = json.dumps(table.attrs["receipt"])
    return pyarrow.table(columns).replace_schema_metadata({"torchlens": receipt})


def to_parquet(history: Any, path: str | os.PathLike[str]) -> None:
    """Writes the table to a file."""
    target = checked_file("path", path, "model.parquet")
    table = to_arrow(history)
    from pyarrow import parquet

    with whole_file(target) as beside:
        parquet.write_table(table, beside)


def _array(column: "pandas.Series[Any]", pyarrow: Any) -> Any:
    """Numbers, text, and lists of them as they are; anything else as text."""
    if column.dtype.kind in "biuf":
        return pyarrow.array(column.to_numpy())
    values = [_plain(value) for value in column]
    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):  # of several types
        return pyarrow.array([None if value is None else str(value) for value in values])


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Sequence) and all(isinstance(one, int | str) for one in value):
        return list(value)
    return str(value)
