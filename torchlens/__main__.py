"""`python -m torchlens` is the command `torchlens`."""

import sys

from torchlens._cli.main import main

if __name__ == "__main__":
    sys.exit(main())
