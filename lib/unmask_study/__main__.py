"""The command `unmask`, as `python -m unmask_study` too."""

import sys

from unmask_study.cli import main

if __name__ == "__main__":
    sys.exit(main())
