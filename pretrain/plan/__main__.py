"""``head-schedules plan``; see command.py."""

import sys

from pretrain.plan.command import main

if __name__ == "__main__":
    sys.exit(main())
