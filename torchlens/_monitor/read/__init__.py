"""Reading a run: tables, statistics, findings."""
