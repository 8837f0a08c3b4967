"""``head-schedules evaluate``; see command.py."""

import sys

from pretrain.evaluation.command import main

if __name__ == "__main__":
    sys.exit(main())
