"""``python -m pretrain.diagnostics``; see command.py."""

import sys

from pretrain.diagnostics.command import main

sys.exit(main())
