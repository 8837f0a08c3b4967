"""What a launcher would tell the ranks of this machine, for benchmarks that start them without one."""

from __future__ import annotations


def rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Environment of one of *ranks* processes that meet at *port*."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
