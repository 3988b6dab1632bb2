"""The `ftkit` program."""

import signal
import sys

is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if is_usual:  # while modules are imported, Ctrl-C ends the program without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from ftkit.cli.main import main  # noqa: E402

if is_usual:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if __name__ == "__main__":
    sys.exit(main())
