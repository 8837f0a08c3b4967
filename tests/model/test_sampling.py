"""Sampling: distributions, seeds, and a cache that changes no token."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model.errors import UserError
from model.sampling import generate, make_cached_predictor, make_recomputing_predictor, pick, sample
from tests.helpers.marks import slow
from tests.helpers.networks import CONFIGS, network, tokens


def test_pick_follows_temperature_and_top_p():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    assert {pick(logits, 0, 1.0, generator) for _ in range(5)} == {0}
    # Probabilities 0.64, 0.24, 0.09, 0.03: the first two reach 0.8.
    assert {pick(logits, 1.0, 0.8, generator) for _ in range(200)} == {0, 1}
    counts = torch.bincount(
        torch.tensor([pick(logits, 1.0, 1.0, generator) for _ in range(4000)]), minlength=4
    )
    assert {pick(logits, 1e-30, 1.0, generator) for _ in range(5)} == {0}
    # Four standard deviations of a share of 4,000 draws are 0.03.
    torch.testing.assert_close(counts / 4000, logits.softmax(0), atol=0.03, rtol=0)


NAMES = list(CONFIGS)


@pytest.mark.parametrize("name", [*NAMES[::6], *slow(name for name in NAMES if name not in NAMES[::6])])
def test_cache_changes_no_token_even_beyond_the_context(name):
    """64 positions of context; 90 tokens are asked for."""
    ours = network(name)
    prompt = tokens(1, 7)[0].tolist()
    options = {"count": 90, "temperature": 0.9, "top_p": 0.95, "seed": 5}
    assert list(sample(make_cached_predictor(ours), prompt, **options)) == list(
        sample(make_recomputing_predictor(ours, 64), prompt, **options)
    )
    assert generate(ours, prompt, 90, 64, 0.9, 0.95, 5) == list(
        sample(make_cached_predictor(ours), prompt, **options)
    )


def test_same_seed_same_text():
    predict, prompt = make_recomputing_predictor(network("prism"), 64), [5, 6]
    assert list(sample(predict, prompt, 20, 1.0, 1.0, 1)) == list(sample(predict, prompt, 20, 1.0, 1.0, 1))
    assert list(sample(predict, prompt, 20, 1.0, 1.0, 1)) != list(sample(predict, prompt, 20, 1.0, 1.0, 2))


def test_a_prompt_longer_than_the_context():
    ours = network("prism")
    prompt = tokens(1, 100)[0].tolist()
    assert len(list(sample(make_cached_predictor(ours), prompt, 3, 0, 1, 0))) == 3


NUMBERS = st.floats(width=32) | st.sampled_from([0.0, 3e38, -3e38, 1e-45, math.inf, -math.inf, math.nan])


@pytest.mark.slow
@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    st.lists(NUMBERS, min_size=1, max_size=6),
    st.floats(0, 2.0**63),
    st.floats(0, 1, exclude_min=True),
    st.booleans(),
)
@example([1.0, 2.0], 1.0, 1e-320, False)
@example([3e38, -3e38, 1.0], 1e-4, 0.5, False)
def test_any_number_gives_a_likely_token_or_a_refusal(logits, temperature, top_p, greedy):
    """A token that is left out by top_p by fp64 arithmetic with some room is never taken."""
    values = torch.tensor(logits, dtype=torch.float32)
    temperature = 0.0 if greedy else temperature
    generator = torch.Generator().manual_seed(0)
    if not math.isfinite(values.max().item()):
        with pytest.raises(UserError, match="model: its logits are not finite"):
            pick(values, temperature, top_p, generator)
        return
    token = pick(values, temperature, top_p, generator)
    if temperature < 1e-4:
        assert values[token] == values.max()
    likely = (values.double() / max(temperature, 1e-4)).softmax(0)
    assert likely[likely > likely[token] * (1 + 1e-5)].sum() <= top_p + 1e-5
