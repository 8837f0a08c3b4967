"""``head-schedules prepare``; see command.py."""

import sys

from pretrain.prepare.command import main

if __name__ == "__main__":
    sys.exit(main())
