"""Names that other tools use, for hints in errors."""
