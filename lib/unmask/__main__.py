"""The command `unmask`, as `python -m unmask` too."""

import sys

from unmask.cli import main

if __name__ == "__main__":
    sys.exit(main())
