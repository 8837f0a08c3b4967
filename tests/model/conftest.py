"""The networks here are so small that a second thread only waits for the first."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """Compute on one thread, and put back what was set."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
