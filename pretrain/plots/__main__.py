"""``python -m pretrain.plots``: see pretrain/plots/curves.py."""

import sys

from pretrain.plots.curves import main

if __name__ == "__main__":
    sys.exit(main())
