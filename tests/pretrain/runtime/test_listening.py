"""Where the ranks' rendezvous can be reached."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta
from unittest import mock

import psutil
import pytest
import torch.distributed as dist

from pretrain.runtime.rendezvous import _listen_on_this_machine, _reach_the_others


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_on_one_machine_only_the_machine_itself_can_reach_it(monkeypatch, address):
    with socket.create_server((address, 0)) as free:
        port = free.getsockname()[1]
    given = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "RANK": "0", "LOCAL_RANK": "0"}
    for name, value in {**given, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    # The other rank; it waits until the store is there.
    other = threading.Thread(target=lambda: dist.TCPStore(address, port, 2, False, timedelta(seconds=30)))
    other.start()
    store, rank, size = _reach_the_others(0, 2)
    other.join()
    listening = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"]
    assert [place.ip.startswith("127.") for place in listening if place.port == port] == [True]
    store.set("key", "value")
    assert (store.get("key"), rank, size) == (b"value", 0, 2)


def test_elsewhere_torch_listens():
    for environment in (
        {"MASTER_ADDR": "192.0.2.1"},
        {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"},
    ):
        with mock.patch.dict(os.environ, {"MASTER_PORT": "29500", **environment}):
            assert _listen_on_this_machine() is None


@pytest.mark.parametrize(
    ("address", "sizes", "alone"),
    [
        ("127.0.0.1", {"LOCAL_SIZE": "2"}, True),
        ("127.0.1.1", {"LOCAL_WORLD_SIZE": "2"}, True),
        ("127.0.1.1", {"LOCAL_WORLD_SIZE": "1"}, False),  # its own name in many a system's /etc/hosts
        ("127.0.0.1", {}, False),
        ("0.0.0.0", {"LOCAL_SIZE": "2"}, False),
    ],
)
def test_rank_0_listens_on_the_loopback_interface_where_all_ranks_are(monkeypatch, address, sizes, alone):
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "0"}
    for name, value in {**given, **sizes}.items():
        monkeypatch.setenv(name, value)
    listener = _listen_on_this_machine()
    assert (listener is not None) == alone
    if listener is not None:
        assert listener.getsockname()[0] == address
        listener.close()
