"""Run the command line: `python -m kdpipes`."""

import sys

from kdpipes.cli import main

if __name__ == "__main__":
    sys.exit(main())
