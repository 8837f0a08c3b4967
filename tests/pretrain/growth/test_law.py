"""Predicted head counts against those worked out by hand."""

import math

import pytest

from model.declared import from_dict
from model.errors import UserError
from model.presets import preset
from pretrain.checkpoint.state import Record, TrainingState
from pretrain.growth.record import Event, GrowthState
from pretrain.growth.report.law import predict


def event(step, layer, head, heads, gamma, kind="grow"):
    return {
        "step": step,
        "layer": layer,
        "head": head,
        "kind": kind,
        "heads": heads,
        "gamma": gamma,
        "lambda_max": 1.0,
    }


def grown(layer, gammas, start=2):
    """A head at every tenth step, led to by these Γ."""
    return [event(10 * i + 10, layer, start + i, start + i + 1, gamma) for i, gamma in enumerate(gammas)]


def record(events, thresholds):
    layers = [{"below": [], "thresholds": pair} for pair in thresholds]
    return from_dict(GrowthState, {"start": 2, "layers": layers, "events": events})


def test_an_exponential_decay_is_predicted_exactly():
    # Γ = 8 · 2^(-(K - 2)): κ² = 1 / ln 2. θ_w = 0.25 is reached at K = 2 + log2(8 / 0.25) = 7.
    (found,) = predict(record(grown(0, [8, 4, 2, 1, 0.5]), [[0.25, 0.1]]), [7])
    assert (found.events, found.fitted, found.observed, found.why_not) == (5, 3, 7, "")
    assert found.kappa_squared == pytest.approx(1 / math.log(2))
    assert found.predicted == pytest.approx(7)
    assert found.relative_error == pytest.approx(0)


def test_only_the_first_half_counts():
    # Eight events: the first four fall by 2 each, what comes after is not looked at.
    (found,) = predict(record(grown(0, [8, 4, 2, 1, 900, 900, 900, 900]), [[0.25, 0.1]]), [10])
    assert (found.events, found.fitted) == (8, 4)
    assert found.predicted == pytest.approx(7)
    assert found.relative_error == pytest.approx(-0.3)


def test_noise_is_fitted_by_least_squares():
    # ln Γ = 3, 2, 2.5 at K = 2, 3, 4: slope (-1 · 0.5 + 1 · 0) / 2 = -0.25, so κ² = 4; K* = 2 + 4 · (3 - 1) =
    # 10.
    events = grown(0, [math.exp(3), math.exp(2), math.exp(2.5)])
    (found,) = predict(record(events, [[math.e, 0.1]]), [8])
    assert found.kappa_squared == pytest.approx(4)
    assert found.predicted == pytest.approx(10)
    assert found.relative_error == pytest.approx(0.25)


def test_heads_before_an_event_are_those_after_the_one_before():
    """A head is pruned in between: Γ was measured with 2, 3, 4 and again 3 heads."""
    events = [*grown(0, [16, 8]), event(25, 0, 1, 3, 9.0, "prune"), event(30, 0, 3, 4, 8.0)]
    # Γ = 16 · 2^(-(K - 2)) with K = 2, 3, 3: reaches 0.5 at 7.
    (prediction,) = predict(record(events, [[0.5, 0.1]]), [7])
    assert prediction.predicted == pytest.approx(7)


def test_changes_that_are_not_made_yet_are_not_counted():
    """Of a checkpoint written for an event: its model has the heads from before."""
    events = grown(0, [8, 4, 2])
    pending = [{"layer": 0, "head": 4, "kind": "grow"}]
    found = from_dict(GrowthState, {"start": 2, "events": events, "pending": pending})
    assert [event.heads for event in found.list_made()] == [3, 4]


def test_nothing_is_filled_in():
    events = [*grown(0, [4, 2]), *grown(1, [1, 2, 4]), *grown(2, [4, 2, 1]), *grown(3, [4, -2, 1])]
    found = predict(record(events, [[0.5, 1], [0.5, 1], None, [0.5, 1], [0, 1]]), [4, 5, 5, 5, 2])
    assert [prediction.why_not for prediction in found] == [
        "fewer than 3 growth events",
        "Γ does not fall over the first 3 growth events",
        "no threshold θ_w above zero",
        "a Γ that is not above zero",
        "fewer than 3 growth events",
    ]
    assert all(p.predicted is None and p.kappa_squared is None and p.relative_error is None for p in found)
    assert [prediction.events for prediction in found] == [2, 3, 3, 3, 0]


def test_a_record_is_read():
    assert GrowthState.from_state(TrainingState()) is None
    found = record(grown(1, [4]), [None, [1, 2]])
    assert [layer.thresholds for layer in found.layers] == [None, (1.0, 2.0)]
    assert found.events == [Event(10, 1, 2, "grow", 3, 4.0, 1.0)]
    assert from_dict(GrowthState, found.to_json()) == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": 0}, r"growth\.start: 0 is not valid; give a number above 0"),
        ({"pending": 3}, r"growth\.pending: 3 is not valid"),
        ({"what": 1}, r"growth\.what: unknown"),
        ({"layers": [{"below": []}]}, "is not of a model of 4 layers"),
        ({"layers": [{"below": [0, 0]}] * 4}, "does not describe the model's heads"),
        ({"layers": [{"below": [], "thresholds": [1]}] * 4}, r"growth\.layers\.0\.thresholds\.1.*missing"),
        ({"events": [event(10, 4, 2, 3, 1.0)]}, "is not of a model of 4 layers"),
        ({"events": [event(10, 0, 2, 3, 1.0, "shrink")]}, r"events\.0\.kind: 'shrink' is not valid"),
    ],
)
def test_an_edited_record_is_refused(changes, message):
    values = {"start": 2, "layers": [{"below": []}] * 4, "events": []} | changes
    state = TrainingState(records={"growth": Record(values)}, model=preset("prism-nano").to_json())
    with pytest.raises(UserError, match=message):
        GrowthState.read(state, [1, 1, 1, 1])
