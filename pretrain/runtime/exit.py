"""How a rank ends: with one line for bad input, else with its own traceback, before those of ranks that lost it."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback

from model.errors import UserError

# What gloo, NCCL and the store say when another rank is gone.
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "NCCL communicator was aborted",
    "NCCL Error 6",
    "remote process exited or there was a network error",
    "Timed out waiting",
    "recvValue failed",
    "failed to recv",
    "Application timeout caused pair closure",
)
WAIT_SECONDS = 5.0
"""How long a rank that lost another waits before it says so: the other one's traceback is to come first."""
FAILED = 1


def exit_with(error: UserError, rank: int = 0) -> None:
    """Print the one line of a UserError (on rank 0) and end with exit code 2."""
    if rank == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    sys.exit(2)


def end_after(error: BaseException, rank: int, wait: float = WAIT_SECONDS) -> None:
    """Print how this rank failed, and end the process with FAILED.

    A rank that lost another prints one line, after a while; by then a launcher has usually ended it.
    """
    where = f"rank {rank} on {socket.gethostname()}"
    if lost_peer(error):
        time.sleep(wait)
        text = f"error: {where} lost another rank, which says why above ({_first_line(error)})\n"
    else:
        text = "".join([f"error: {where} failed:\n", *traceback.format_exception(error)])
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()
    # Not sys.exit: on the way out, process groups would wait for ranks that no longer answer.
    os._exit(FAILED)


def lost_peer(error: BaseException | None) -> bool:
    """Whether *error*, or what it came from, says that another rank is gone."""
    while error is not None:
        if isinstance(error, (RuntimeError, ConnectionError)) and any(
            text in str(error) for text in LOST_PEER
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
