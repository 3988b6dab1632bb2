"""The `ftkit` program."""

import sys

from ftkit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
