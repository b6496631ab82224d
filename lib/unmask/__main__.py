"""`python -m unmask` is the command `unmask`."""

import sys

from unmask.cli import main

sys.exit(main())
