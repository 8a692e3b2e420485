"""The commands of `torchlens`, one file each: `add_arguments(parser)` says what it takes,
`run(arguments)` does it.

`run` returns the exit code: 0, or 1 if a comparison found a difference. An exception becomes a
message and exit code 2.
"""
