"""`python -m dpl` is the command `dpl`."""

import sys

from dpl.cli import main

if __name__ == "__main__":
    sys.exit(main())
