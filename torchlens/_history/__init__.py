"""What the user holds: data and lookups."""
