"""``head-schedules plot``: see pretrain/plots/command.py."""

import sys

from pretrain.plots.command import main

if __name__ == "__main__":
    sys.exit(main())
