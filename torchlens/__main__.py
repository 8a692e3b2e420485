"""`python -m torchlens` is the command `torchlens`."""

import sys

from torchlens.cli import main

if __name__ == "__main__":
    sys.exit(main())
