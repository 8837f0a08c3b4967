"""``head-schedules study``: see pretrain/study/command.py."""

import sys

from pretrain.study.command import main

if __name__ == "__main__":
    sys.exit(main())
