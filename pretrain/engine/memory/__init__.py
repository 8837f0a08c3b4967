"""The memory of a rank by arithmetic, and the micro-batch that fits into it."""
