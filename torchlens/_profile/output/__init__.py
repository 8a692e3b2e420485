"""What was measured, as people and programs read it: tables, JSON, data frames, colours."""
