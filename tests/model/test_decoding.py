"""Token by token with a cache gives the logits of the whole sequence at once.

1e-12 in fp64: what is left is the order of sums.
"""

import pytest
import torch

from model import decoding
from model.decoding import CachedDecoder
from model.errors import UserError
from tests.helpers.networks import CONFIGS, network, tokens


@pytest.mark.parametrize("chunks", [(1,) * 40, (13, 1, 20, 6)])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_the_full_forward_pass(name, chunks, monkeypatch):
    monkeypatch.setattr(decoding, "LEAST_ROOM", 4)  # so that the cache grows
    ours, ids = network(name, torch.float64), tokens(2, 40)
    decoder = CachedDecoder(ours, batch=2)
    expected = ours(ids)
    for chunk in ids.split(list(chunks), dim=1):
        logits = decoder.append(chunk)
        torch.testing.assert_close(logits, expected[:, decoder.length - 1], rtol=0, atol=1e-12)


def test_beyond_the_context():
    decoder = CachedDecoder(network("prism"))
    decoder.append(tokens(1, 60))
    with pytest.raises(UserError, match="65 positions exceed context_length 64"):
        decoder.append(tokens(1, 5))
