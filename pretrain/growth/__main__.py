"""``head-schedules growth``; see report/command.py."""

import sys

from pretrain.growth.report.command import main

if __name__ == "__main__":
    sys.exit(main())
