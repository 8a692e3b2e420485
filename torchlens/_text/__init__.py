"""How anything is printed: sizes, times, shapes, tables, and the wording of errors."""
