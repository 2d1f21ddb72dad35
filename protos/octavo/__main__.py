"""`python -m octavo`: the same as the console script `octavo`."""

import sys

from octavo.cli import main

if __name__ == "__main__":
    sys.exit(main())
