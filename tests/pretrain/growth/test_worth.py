"""Worths against two whole models, one of them with zeros in the head's columns of o, and plain cross
entropy."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model.errors import UserError
from pretrain.data.sequences import pack_documents
from pretrain.growth.report import worth
from pretrain.growth.report.worth import Ablation, measure_worths
from tests.helpers.networks import CONFIGS, network

WINDOWS = np.random.default_rng(3).integers(2, 260, (5, 25))
ROWS = WINDOWS[:, :-1], WINDOWS[:, 1:]
# Where documents begin in each window's inputs.
STARTS = [np.array(row) for row in ([0], [0, 7], [0, 3, 20], [0], [0, 23])]


def without(ours, heads):
    """A copy of the network with zeros in the columns of o that these heads of layers write to."""
    cut = copy.deepcopy(ours)
    for layer, head in heads:
        size = cut.config.layer_head_dim(layer)
        cut.layers[layer].attention.o.weight[:, head * size : (head + 1) * size] = 0
    return cut


def plain_losses(ours, starts=None):
    """Mean loss of each window, from whole logits in fp64."""
    windows = torch.from_numpy(WINDOWS)
    offsets = None if starts is None else torch.from_numpy(pack_documents(starts, windows.shape[1] - 1))
    logits = ours(windows[:, :-1], document_offsets=offsets).double()
    losses = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none")
    return losses.view(len(windows), -1).mean(1)


@pytest.mark.parametrize(
    "name", ["ablation", "grouped", "head_dim", "gpt2_prism", "gptneo_windows", "biases"]
)
def test_worths_are_those_of_two_whole_models(name, monkeypatch):
    monkeypatch.setitem(worth.TOKENS_AT_ONCE, "cpu", 2 * 24)  # three batches, the last smaller
    ours = network(name)
    found = measure_worths(ours, *ROWS)
    whole = plain_losses(ours)
    # 1e-6 nats: losses of about 6 in fp32, averaged in fp64 over 120 tokens.
    assert found.loss == pytest.approx(whole.mean().item(), abs=1e-6)
    assert (found.windows, found.tokens) == (5, 120)
    assert tuple(found.heads["layer"].value_counts(sort=False)) == CONFIGS[name].heads
    heads = [(layer, head) for layer, count in enumerate(CONFIGS[name].heads) for head in range(count)]
    for place, worth_of, error in zip(heads, found.heads["worth"], found.heads["error"], strict=True):
        difference = plain_losses(without(ours, [place])) - whole
        assert worth_of == pytest.approx(difference.mean().item(), abs=1e-6), place
        assert error == pytest.approx(np.std(difference.numpy(), ddof=1) / math.sqrt(5), abs=1e-6)
    assert found.heads["worth"].abs().max() > 1e-4 and "gate" not in found.heads


@pytest.mark.parametrize("name", ["head_gate", "element_gate"])
def test_gates_are_means_over_all_tokens(name, monkeypatch):
    monkeypatch.setitem(worth.TOKENS_AT_ONCE, "cpu", 2 * 24)
    ours, expected = network(name), []
    found = measure_worths(ours, *ROWS)
    with torch.no_grad():
        stream = ours.token_embedding(torch.from_numpy(WINDOWS[:, :-1]))
        if ours.position_embedding is not None:
            stream = stream + ours.position_embedding(torch.arange(stream.shape[1]))
        _, inputs = ours.enter(torch.from_numpy(WINDOWS[:, :-1]))
        for layer, (block, given) in enumerate(zip(ours.layers, inputs, strict=True)):
            if heads := CONFIGS[name].heads[layer]:
                weight = (block.attention.head_gate or block.attention.gate).weight
                gates = 1 / (1 + (-block.attention_norm(stream) @ weight.T).exp())
                expected += gates.mean((0, 1)).view(heads, -1).mean(1).tolist()
            stream = block(stream, *given)
    assert found.heads["gate"].tolist() == pytest.approx(expected, abs=1e-6)


def worths_of(found, layer):
    """The worths of a layer's heads."""
    return found.heads["worth"][found.heads["layer"] == layer].tolist()


def test_documents_are_kept_apart():
    ours = network("prism")
    found = measure_worths(ours, *ROWS, STARTS, points=2)
    whole = plain_losses(ours, STARTS)
    assert found.loss == pytest.approx(whole.mean().item(), abs=1e-6)
    assert abs(found.loss - plain_losses(ours).mean().item()) > 1e-5
    difference = plain_losses(without(ours, [(1, 2)]), STARTS) - whole
    assert worths_of(found, 1)[2] == pytest.approx(difference.mean().item(), abs=1e-6)


def test_a_head_that_writes_nothing_is_worth_nothing():
    found = measure_worths(without(network("biases"), [(1, 1)]), *ROWS)
    assert [value == 0 for value in worths_of(found, 1)] == [False, True, False]
    assert all(worths_of(found, 0)) and sum(found.heads["error"] == 0) == 1


def test_the_curve_removes_the_smallest_worths_first():
    ours = network("ablation")  # 1 + 2 + 4 + 6 heads
    found = measure_worths(ours, *ROWS)
    order = sorted(
        (value, layer, head) for layer in range(4) for head, value in enumerate(worths_of(found, layer))
    )
    assert found.curve["removed"].tolist() == [0, 1, 3, 4, 5, 6, 8, 9, 10, 12, 13]
    for point in found.curve.itertuples():
        heads = [(layer, head) for _, layer, head in order[: point.removed]]
        loss = plain_losses(without(ours, heads)).mean().item()
        assert point.loss == pytest.approx(loss, abs=1e-6)
        assert point.increase == pytest.approx(loss / found.loss - 1, abs=1e-6)
        assert point.share == point.removed / 13
    assert found.removable["removed"] == max(found.curve["removed"][found.curve["increase"] <= 0.01])


def test_the_network_is_left_as_it_was(monkeypatch):
    ours = network("grouped")
    before = plain_losses(ours)
    ablation = Ablation(ours, *ROWS)
    monkeypatch.setattr(ablation, "_loss", lambda hidden, labels: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        ablation.losses([{(0, 0), (2, 1)}])
    assert torch.equal(plain_losses(ours), before)


def test_one_window_has_no_standard_error():
    found = measure_worths(network("uniform"), WINDOWS[:1, :-1], WINDOWS[:1, 1:], points=1)
    assert found.heads["error"].isna().all()


def test_a_model_without_a_loss():
    broken = network("uniform")
    broken.final_norm.weight[0] = math.nan
    with pytest.raises(UserError, match="loss: that of the whole model on held-out text is nan"):
        measure_worths(broken, *ROWS)
