"""``python -m pretrain.growth``; see command.py."""

import sys

from pretrain.growth.command import main

if __name__ == "__main__":
    sys.exit(main())
