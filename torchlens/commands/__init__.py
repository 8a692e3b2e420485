"""The commands of `torchlens`, one file each: `add_arguments(parser)` says what it takes, `run(arguments)` does it.

`run` returns what the shell gets: 0, or 1 where a comparison found a difference. What it raises becomes a message and 2.
"""
