"""Run the command line as `python -m kvprefetch.daemon`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
