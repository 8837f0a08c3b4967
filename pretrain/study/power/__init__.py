"""How many seeds a study needs and what it costs: ``plan`` joins ``spread``, ``window_losses`` and ``costs``."""
