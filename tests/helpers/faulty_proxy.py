"""A proxy in front of a server that can fail: it closes, cuts or slows connections, as requested."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from typing import Literal

Mode = Literal["works", "refuses", "cuts", "slow"]


class FaultyProxy:
    """Hands TCP connections on to a local port, until ``close``.

    ``mode``, one of Mode, applies to what is sent from now on: every connection is closed, is closed after
    some thousand bytes, or waits a tenth of a second before each piece.
    """

    def __init__(self, target: int, seed: int = 0) -> None:
        self.target, self.mode = target, "works"
        self._random = random.Random(seed)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                if self.mode == "refuses":
                    client.close()
                    continue
                try:
                    server = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    client.close()
                    continue
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._hand_on, args=ends, daemon=True).start()

    def _hand_on(self, source: socket.socket, target: socket.socket) -> None:
        left = self._random.randint(100, 60_000)
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                left -= len(data)
                if self.mode == "refuses" or (self.mode == "cuts" and left < 0):
                    break
                if self.mode == "slow":
                    time.sleep(0.1)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
