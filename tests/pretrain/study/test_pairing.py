"""What runs of one seed share, against weights that are really drawn."""

from __future__ import annotations

import pytest
import torch

from model.initialization import initialize
from model.transformer import Transformer
from pretrain.config.run_config import RunConfig
from pretrain.study.pairing import pairing, pairing_lines
from tests.pretrain.study.test_study_file import changed, study

BASE = RunConfig(model="prism-nano")


def share_of_equal_weights(run, baseline):
    """By drawing both models: entries of parameters that are the same in name, shape and all values."""
    networks = []
    for config in (run, baseline):
        network = Transformer(config.build_model_config(config.vocab_size))
        initialize(network, config.seed)
        networks.append(dict(network.named_parameters()))
    equal = sum(
        parameter.numel()
        for name, parameter in networks[0].items()
        if name in networks[1] and torch.equal(parameter, networks[1].get(name, parameter))
    )
    return equal / sum(parameter.numel() for parameter in networks[0].values())


@pytest.mark.parametrize(
    "other",
    [
        {"heads": "4,4,3,2"},
        {"architecture": {"ffn_width": 96}},
        {"architecture": {"init_std": 0.03}},
        {"architecture": {"heads": "2,4", "ffn_width": 128}},
        {"model": "gpt2-nano"},
        {"vocab_size": 1024},
    ],
    ids=["order", "width", "spread", "depth", "blocks", "vocabulary"],
)
def test_the_share_of_equal_weights_is_that_of_drawn_models(other):
    run = RunConfig(**{"model": "prism-nano", **other})
    found = pairing(run, BASE)
    assert found.data == ("vocab_size" not in other)
    assert found.weights == pytest.approx(share_of_equal_weights(run, BASE), abs=1e-12)


def test_another_seed_shares_nothing():
    assert pairing(RunConfig(model="prism-nano", seed=2), BASE).weights == 0
    assert not pairing(RunConfig(model="prism-nano", seed=2), BASE).data


def test_another_length_or_text_is_another_order_of_data():
    assert not pairing(RunConfig(model="prism-nano", architecture={"context_length": 32}), BASE).data
    assert not pairing(RunConfig(model="prism-nano", data="data/other"), BASE).data


def test_lines_name_the_variants():
    (line,) = pairing_lines(study())
    assert line.startswith("prism with uniform, seed by seed: data order: the same; first weights: ")
    uniform, prism = (planned.run for planned in study().runs[:2])
    assert line.endswith(f"{share_of_equal_weights(prism, uniform):.1%} the same")


def test_lines_name_the_variant_that_one_is_compared_with():
    text = changed(
        variants={
            "uniform": {"heads": "4x4"},
            "a": {"heads": "2x4"},
            "b": {"heads": "1x4", "against": "a"},
            "c": {"heads": "8x4", "seed_shift": 10},
        }
    )
    lines = pairing_lines(study(text))
    assert [line.split(", seed")[0] for line in lines] == ["a with uniform", "b with a", "c with uniform"]
    assert lines[2].endswith("data order: another; first weights: others")
