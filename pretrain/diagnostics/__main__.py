"""``head-schedules diagnose``; see command.py."""

import sys

from pretrain.diagnostics.command import main

if __name__ == "__main__":
    sys.exit(main())
