"""Decisions on planted measures, against what the settings say in words."""

from types import SimpleNamespace

import pytest
import torch

from model.blocks import block
from model.errors import UserError
from model.initialization import initialize
from model.presets import preset
from model.transformer import Transformer
from pretrain.checkpoint.state import Record, TrainingState
from pretrain.config.growth import GrowthConfig
from pretrain.growth import hook
from pretrain.growth.check import Check, LayerMeasure
from pretrain.growth.edit import apply_changes, candidate
from pretrain.growth.record import NAME, Change, GrowthState
from pretrain.growth.spectrum import extremes

D = 12
MODEL = block(
    "llama", vocab_size=64, context_length=8, d_model=D, heads="2x3", ffn_width=16, head_dim=[4, 4, 4]
)


def measure(largest, energies=(9.0, 9.0), gamma=10.0):
    energy = torch.diag(torch.tensor([largest, *[0.01 * i for i in range(D - 2)], -largest]))
    return LayerMeasure(energy, gamma, extremes(energy), list(energies))


def checks(config, layers, count, heads=(2, 2, 2), most=4, norms=None):
    """The changes of *count* checks that all measure the same."""
    return run_checks(config, [layers] * count, heads, most, norms)


def run_checks(config, measured, heads, most=4, norms=None):
    """The changes of one check after the other, each with the measures of all layers."""
    state = GrowthState.begin(heads)
    captured, heads, found = [torch.zeros(0, D) for _ in heads], list(heads), []
    for step, layers in enumerate(measured, 1):
        measures = [
            LayerMeasure(m.residual, m.gamma, m.extremes, (m.energies * 4)[: heads[layer]])
            for layer, m in enumerate(layers)
        ]
        Check(config, most, 1, heads, state, measures, captured).decide(step, norms or {})
        found.append([(change.kind, change.layer, change.head) for change in state.pending])
    return found, heads, state


def test_thresholds_are_shares_of_the_median_of_the_calibration():
    config, state = GrowthConfig(criterion="incrt", calibration=3), GrowthState.begin([2])
    for step, gamma in enumerate((1.0, 50.0, 3.0)):
        assert state.layers[0].thresholds is None
        Check(config, 4, 1, [2], state, [measure(0.0, gamma=gamma)], [torch.zeros(0, D)]).decide(step, {})
    assert state.layers[0].thresholds == pytest.approx([0.3, 0.003])


def test_a_run_goes_on_with_other_thresholds():
    measures, captured = [measure(2.0, gamma=10.0)], [torch.zeros(0, D)]
    state = GrowthState.begin([2])
    for step, (settings, expected) in enumerate(
        [
            ({"grow_share": 0.5}, None),
            ({"grow_share": 0.5}, [5.0, 0.05]),
            ({"grow_share": 0.8, "prune_share": 0.5}, [8.0, 4.0]),  # of the same calibration
            ({"grow_above": 100.0}, [100.0, 1.0]),
            ({"grow_above": 3.0, "prune_share": 0.5}, [3.0, 1.5]),
            ({"grow_share": 0.5, "prune_below": 7.0}, [5.0, 5.0]),  # what just grew is not pruned at once
        ]
    ):
        config = GrowthConfig(criterion="incrt", calibration=2, **settings)
        Check(config, 4, 1, [2], state, measures, captured).decide(step, {})
        assert state.pending == []
        assert state.layers[0].thresholds == (expected and pytest.approx(expected))


def test_the_most_urgent_layers_come_first_and_wait():
    config = GrowthConfig(criterion="incrt", grow_above=1.0, dwell=1, budget=8)
    found, heads, _ = checks(config, [measure(2.0), measure(0.5), measure(3.0)], 4)
    assert found == [[("grow", 2, 2), ("grow", 0, 2)], [], [], []]  # 8 heads in all are the budget
    assert heads == [3, 2, 3]
    config = GrowthConfig(criterion="incrt", grow_above=1.0, dwell=1)
    found, heads, _ = checks(config, [measure(2.0), measure(0.5), measure(3.0)], 6)
    assert [len(changes) for changes in found] == [2, 0, 2, 0, 0, 0]  # four heads are the most
    assert heads == [4, 2, 4]


def test_a_head_is_pruned_after_its_patience_and_one_stays():
    config = GrowthConfig(criterion="incrt", grow_above=1.0, prune_below=0.1, patience=3, dwell=0)
    weak = [measure(0.5, (9.0, 0.05)), measure(0.5, (0.02, 0.05)), measure(0.5)]
    found, heads, _ = checks(config, weak, 3)
    assert found == [[], [], [("prune", 0, 1), ("prune", 1, 0)]]
    assert heads == [1, 1, 2]
    _, heads, state = checks(config, weak, 20)
    assert heads == [1, 1, 2] and len(state.layers[1].below) == 1  # a layer keeps one, however weak


PRUNING = {"criterion": "incrt", "grow_above": 1.0, "prune_below": 0.1}


def test_the_weakest_of_the_ready_heads_goes():
    weak = [measure(0.5, (0.05, 0.02)), measure(0.5), measure(0.5)]
    found, _, _ = checks(GrowthConfig(**PRUNING, patience=3, dwell=0), weak, 3)
    assert found == [[], [], [("prune", 0, 1)]]


def check_one_layer(config, energies, heads=2, largest=0.5):
    """What each check of a layer decides, given the energies of its heads then; and the state."""
    found, _, state = run_checks(config, [[measure(largest, each)] for each in energies], [heads])
    return [[(kind, head) for kind, _, head in changes] for changes in found], state


def test_patience_is_of_checks_in_a_row():
    low, high = (9.0, 0.05), (9.0, 9.0)
    config = GrowthConfig(**PRUNING, patience=3, dwell=0)
    found, _ = check_one_layer(config, [low, low, high, low, low, low])
    assert found == [[], [], [], [], [], [("prune", 1)]]


def test_a_layer_that_lost_a_head_waits_too():
    weak = [measure(0.5, (0.05, 0.05)), measure(0.5), measure(0.5)]
    found, _, _ = checks(GrowthConfig(**PRUNING, patience=1, dwell=2), weak, 4, heads=(4, 2, 2))
    assert [len(changes) for changes in found] == [1, 0, 0, 1]


def test_a_layer_that_grows_loses_no_head_at_once():
    found, _ = check_one_layer(GrowthConfig(**PRUNING, patience=1, dwell=0), [(9.0, 0.05)], largest=2.0)
    assert found == [[("grow", 2)]]


def test_the_other_heads_keep_their_counts():
    first, then = (0.02, 9.0, 9.0), (0.02, 9.0, 0.05)
    found, state = check_one_layer(GrowthConfig(**PRUNING, patience=3, dwell=0), [first, then, then], heads=3)
    assert found[2] == [("prune", 0)] and state.layers[0].below == [0, 2]


def test_random_depends_on_the_seed_and_the_step_only():
    config = GrowthConfig(criterion="random", calibration=2, budget=9)
    layers = [measure(2.0)] * 3
    first, heads, _ = checks(config, layers, 8)
    assert first == checks(config, layers, 8)[0]
    assert [len(changes) for changes in first] == [0, 1, 1, 1, 0, 0, 0, 0] and sum(heads) == 9


def test_gradient_takes_the_largest():
    config = GrowthConfig(criterion="gradient", calibration=1)
    found, _, _ = checks(config, [measure(2.0)] * 3, 3, norms={0: 1.0, 1: 3.0, 2: 2.0})
    assert found[:2] == [[("grow", 1, 2)], [("grow", 1, 3)]]
    given = ([4, 2, 2], GrowthState.begin([4, 2, 2]), [measure(2.0)] * 3, [torch.zeros(0, D)] * 3)
    compared = Check(config, 4, 1, *given).candidates()
    assert [(change.layer, change.head) for change in compared] == [(1, 2), (2, 2)]  # layer 0 has its most
    spent = GrowthConfig(criterion="gradient", calibration=1, budget=8)
    assert Check(spent, 4, 1, *given).candidates() == {}


@pytest.mark.parametrize("criterion", ["incrt", "random", "gradient"])
def test_all_criteria_begin_at_the_last_check_of_the_calibration(criterion):
    config = GrowthConfig(criterion=criterion, calibration=3, grow_share=0.1)
    found = checks(config, [measure(2.0)] * 3, 3, norms={0: 1.0, 1: 3.0, 2: 2.0})[0]
    assert [bool(changes) for changes in found] == [False, False, True]


def test_a_new_head_lies_along_its_directions():
    pair = torch.eye(D)[[3, 7]]
    head = candidate(MODEL, 1, 10, Change(0, 2, "grow"), pair)
    for weight, direction in zip(head[:2], pair, strict=True):
        share = (weight @ direction).square().sum() / weight.square().sum()
        assert share > 0.97
    again = candidate(MODEL, 1, 10, Change(0, 2, "grow"), pair)
    assert all(torch.equal(a, b) for a, b in zip(head, again, strict=True))
    other = candidate(MODEL, 1, 11, Change(0, 2, "grow"), None)
    assert not torch.equal(head.value, other.value)


def test_queries_and_keys_of_a_new_head_agree_in_sign():
    """So that every dimension of it adds to the product along its directions."""
    pair = torch.eye(D)[[3, 7]]
    head = candidate(MODEL, 1, 10, Change(0, 2, "grow"), pair)
    query, key = head.query @ pair[0], head.key @ pair[1]
    assert (query @ key / (query.norm() * key.norm())).item() > 0.95


MUP = {"parametrization": "mup", "base_width": 32, "attention_scale": "none"}


@pytest.mark.parametrize("changes", [{}, {"init_std": 0.1}, MUP], ids=str)
@pytest.mark.parametrize("captured", [False, True])
def test_a_new_head_has_the_spread_of_step_0(changes, captured):
    """Against the weights that initialize gives the model. Along its directions it has the length of its
    rows, and a tenth of the spread in all other dimensions: without that, the dimensions of a head would be
    multiples of one vector."""
    sizes = {"vocab_size": 64, "context_length": 8, "d_model": 128, "ffn_width": 16}
    model = block("llama", **sizes, heads=(2, 4), **changes)
    network = Transformer(model)
    initialize(network, 1)
    pair = torch.linalg.qr(torch.randn(128, 2, generator=torch.Generator().manual_seed(3)))[0].T
    for layer, heads in enumerate(model.heads):
        head = candidate(model, 1, 10, Change(layer, heads, "grow"), pair if captured else None)
        for weight, part, direction in zip(head, "qkv", (*pair, None), strict=True):
            spread = getattr(network.layers[layer].attention, part).weight.std().item()
            if captured and direction is not None:
                along = weight @ direction
                assert along.square().mean().sqrt().item() == pytest.approx(spread * 128**0.5, rel=0.4)
                weight, spread = weight - torch.outer(along, direction), 0.1 * spread
            assert weight.std().item() == pytest.approx(spread, rel=0.1), (layer, part)


def test_changes_are_made_one_after_the_other():
    changes = [Change(0, 2, "grow"), Change(0, 3, "grow"), Change(2, 1, "prune")]
    assert apply_changes(MODEL, changes).heads == (4, 2, 1)
    for bad in (Change(0, 3, "grow"), Change(0, 2, "prune"), Change(5, 0, "grow")):
        with pytest.raises(UserError, match=r"growth\.pending"):
            apply_changes(MODEL, [bad])


def test_second_moments_are_averaged_over_the_checks(monkeypatch):
    """Of a hook with planted measurements of a run that is not there."""
    model, found = preset("uniform-tiny"), iter((1.0, 3.0))
    weights = {
        f"layers.{layer}.attention.{part}.weight": torch.randn(model.attention_width(layer), model.d_model)
        for layer in range(model.num_layers)
        for part in "qk"
    }

    def moments(*_):
        value = next(found)
        return [value * torch.eye(width) for width in model.block_widths]

    monkeypatch.setattr(hook, "second_moments", moments)
    monkeypatch.setattr(hook, "query_and_key_weights", lambda *_: weights)
    growth, batch = object.__new__(hook.Growth), SimpleNamespace(accumulation=1)
    growth.session = SimpleNamespace(batch=batch, micro_batch=lambda *_: [], run=SimpleNamespace(seed=1))
    growth.world = SimpleNamespace(is_main=True, broadcast=lambda value: value)
    growth.model, growth.config, growth.most = model, GrowthConfig(criterion="incrt", average=0.75), 9
    growth._moments, growth._top = [None] * model.num_layers, [None] * model.num_layers
    growth._captured, growth._directions = [torch.zeros(0, width) for width in model.block_widths], {}
    state = TrainingState(model=model.to_json())
    state.records[NAME] = Record(GrowthState.begin(model.heads).to_json(), needed=True)
    for _ in range(2):
        growth.run(None, state, {})
    assert growth._moments[0][0, 0].item() == pytest.approx(0.75 * 1 + 0.25 * 3)
