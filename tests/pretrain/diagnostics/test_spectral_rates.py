"""Rates that follow spectra: the exponent against an independent estimate, the mapping by hand, and runs in
other shapes of the world."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from model.errors import UserError
from model.parameters import parameter_specs
from pretrain.checkpoint.state import TrainingState
from pretrain.config.command_line import parse_command_line
from pretrain.config.sections import LLRConfig
from pretrain.diagnostics import spectral_rates
from pretrain.diagnostics.spectral_rates import (
    SETTINGS,
    Factors,
    SpectralRates,
    assign_factors,
    map_exponents,
    measure_exponents,
    random_exponent,
    tail_exponent,
)
from pretrain.engine.layout import engine_flats
from pretrain.optim.groups import run_groups
from tests.helpers.distributed import run_distributed
from tests.helpers.marks import slow
from tests.helpers.shapes import Shape, build
from tests.helpers.training import broken_off, curve, nano_run, session

LLR = "--llr.apply each --llr.every 2 --llr.until 4 --llr.transition 3 --llr.least 12"


def hill(weight):
    """α by the eigenvalues of the smaller Gram matrix, in numpy, and a loop."""
    matrix = np.asarray(weight, dtype=np.float64)
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    values = sorted(np.linalg.eigvalsh(gram))
    first = int(len(values) / 2)
    count, total = len(values) - first, 0.0
    for value in values[first:]:
        total += math.log(value)
    return 1 + count / (total - count * math.log(values[first]))


def test_exponent():
    generator = torch.Generator().manual_seed(3)
    for shape in ((48, 48), (17, 90), (90, 17)):
        weight = torch.randn(shape, generator=generator)
        assert tail_exponent(weight) == pytest.approx(hill(weight), abs=1e-6)
        assert tail_exponent(1000 * weight) == pytest.approx(tail_exponent(weight), abs=1e-6)
    # λ = 1, 2, 4, 8: of the upper half 4 and 8 the sum of logarithms less twice ln 4 is ln 2.
    assert tail_exponent(torch.tensor([1.0, 2.0, 4.0, 8.0]).sqrt().diag()) == pytest.approx(
        1 + 2 / math.log(2)
    )
    assert math.isnan(tail_exponent(torch.zeros(4, 4))) and math.isnan(tail_exponent(torch.eye(6)))


def test_a_random_matrix_has_the_exponent_of_its_aspect_ratio():
    """2.13 and 4.66 were found for 256 x 256 and 32 x 256, with other draws."""
    assert random_exponent(256, 256) == pytest.approx(2.13, abs=0.05)
    assert random_exponent(32, 256) == random_exponent(256, 32) == pytest.approx(4.66, abs=0.2)


def test_an_excess_is_over_a_random_matrix_of_that_shape(monkeypatch):
    weights = {name: torch.randn(shape) for name, shape in (("a", (8, 24)), ("b", (16, 16)))}
    own = SimpleNamespace(gather_full=lambda world: iter(weights.items()))
    monkeypatch.setattr(spectral_rates, "OwnWeights", lambda *_: own)
    world = SimpleNamespace(device=torch.device("cpu"), size=1, rank=0)
    plain, excess = (measure_exponents(None, "ab", {}, world, given) for given in (False, True))
    for name, weight in weights.items():
        assert plain[name] == pytest.approx(tail_exponent(weight))
        assert excess[name] == pytest.approx(plain[name] - random_exponent(*weight.shape))


def test_mapping():
    assert map_exponents([2.0, 4.0, 2.5], 1, 5) == [1, 5, 2]
    assert map_exponents([3.0, 3.0], 1, 5) == [5, 5]
    exponents = {"a": 2.0, "b": 4.0, "c": 2.5}

    def assigned(apply):
        return assign_factors(exponents, ["head"], LLRConfig(apply=apply), seed=1)

    assert assigned("each") == {"a": 1, "b": 5, "c": 2, "head": 5}
    assert assigned("mean") == dict.fromkeys("abc", 3.25) | {"head": 3.25}
    assert assigned("embeddings") == {"head": 5}
    shuffled = assigned("shuffled")
    assert shuffled == assigned("shuffled") != assigned("each")
    assert sorted(shuffled[name] for name in "abc") == [1, 2, 5] and shuffled["head"] == 5
    assert assign_factors({}, ["head"], LLRConfig(apply="each"), seed=1) == {}


def test_factors_move_linearly():
    factors = Factors(4, {"b": 3.0}, {"a": 5.0, "b": 1.0})
    steps = [factors.at(step, 4) for step in (4, 5, 7, 20)]
    assert steps == [{"a": 2, "b": 2.5}, {"a": 3, "b": 2}, {"a": 5, "b": 1}, {"a": 5, "b": 1}]
    assert factors.at(4, 0) == {"a": 5, "b": 1}


def test_a_measurement_within_a_transition_begins_at_the_present_factors(monkeypatch):
    """And a matrix that cannot be measured any more goes back to 1."""
    found = iter([{"a": 2.0, "b": 4.0}, {"a": 4.0, "b": 2.0}, {"a": 2.0, "b": math.nan}])
    monkeypatch.setattr(spectral_rates, "measure_exponents", lambda *_: next(found))
    hook, state = object.__new__(SpectralRates), TrainingState()
    rates, config = SimpleNamespace(factors={}), LLRConfig(apply="each", low=1, high=5)
    hook.session = SimpleNamespace(run=SimpleNamespace(seed=1), world=None, rates=rates)
    hook.config, hook.settings = config, {name: getattr(config, name) for name in SETTINGS}
    hook.every, hook.last, hook.transition, hook._record = 2, 4, 4, None
    hook.measured, hook.follow, hook.specs = ["a", "b"], [], {}
    seen = []
    for step in range(5):
        state.step = step
        hook.before_step(None, state)
        seen.append((rates.factors["a"], rates.factors["b"]))
    assert seen == [pytest.approx(pair) for pair in ((1, 2), (1, 3), (2, 2.5), (3, 2), (3.5, 1.75))]


def test_groups_are_the_matrices():
    run = parse_command_line(f"--config micro --model prism-nano --lr_rules [upper_qk] {LLR}".split()).run
    model = run.build_model_config(300)
    groups = {group.name: group for group in run_groups(run, model)}
    specs = parameter_specs(model)
    matrices = {name for name, spec in specs.items() if len(spec.shape) == 2}
    assert {group.parameters[0] for group in groups.values() if group.separate} == matrices
    assert "upper_qk/layers.3.attention.q/decay" in groups and "base/token_embedding/no_decay" in groups
    assert groups["base/no_decay"].parameters == tuple(n for n, s in specs.items() if len(s.shape) == 1)
    with pytest.raises(UserError, match=r"^llr.high: 0.5 is below llr.low, 1; give at least that"):
        LLRConfig(high=0.5)


def look(run, shape):
    """The exponents that an engine's ranks find."""
    opened = build(run, shape)
    engine, specs = opened.trainer.engine, parameter_specs(opened.model_config)
    names = [name for name, spec in specs.items() if len(spec.shape) == 2 and name.startswith("layers")]
    assert len(engine_flats(engine)) >= len(names)
    return measure_exponents(engine, names, specs, opened.world, False)


def announce(run):
    return build(run, Shape(1, 2)).announce("llr")


@pytest.mark.parametrize("least", [1, 33, 1000])
def test_a_note_names_matrices_too_small_to_be_measured(small_folder, tmp_path, least):
    run = nano_run(small_folder, tmp_path, f"--llr.apply each --llr.least {least}")
    specs = parameter_specs(run.fixed_model_config()).values()
    shapes = [spec.shape for spec in specs if spec.role.layer is not None and len(spec.shape) == 2]
    small = sum(min(shape) < least for shape in shapes)
    note = f"note     llr: {small} of {len(shapes)} matrices have fewer than {least} singular values"
    expected = [f"{note} (llr.least) and keep the base rate"] if small else []
    assert run_distributed(announce, 1, run, timeout=120)[0] == expected


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "stage"),
    [(1, 1, 1), (2, 2, 2), (2, 2, 3), (1, 1, 3), (2, 2, 1), *slow([(2, 1, 2)])],
)
def test_exponents_of_an_engine(small_folder, tmp_path, ranks, tensor_parallel, stage):
    """The same in every shape of the world as numpy finds for the weights of step 0."""
    from model.initialization import initialize
    from model.transformer import Transformer

    flags = f"{LLR} --precision fp32 --tensor_parallel {tensor_parallel} --compile false"
    run = nano_run(small_folder, tmp_path, *flags.split())
    results = run_distributed(look, ranks, run, Shape(ranks, stage, tensor_parallel=tensor_parallel))
    model = Transformer(run.build_model_config(260))
    initialize(model, run.seed)
    for found in results:
        assert found == results[0] and len(found) == 28
        for name, parameter in model.named_parameters():
            if name in found:
                assert found[name] == pytest.approx(hill(parameter.detach()), abs=1e-6), name


def test_a_resumed_run_is_bit_identical(small_folder, tmp_path):
    """Stopped within a transition; and the figures and rates of a run by hand."""
    flags = f"{LLR} --steps 8 --validation.every 0 --checkpoint.every 0 --optimizer.kind muon"
    rows = curve(broken_off(nano_run(small_folder, tmp_path, *flags.split()), 3).folder)
    name, group = "layers.1.ffn.up.weight", "lr/base/layers.1.ffn.up/muon"
    measured = [row for row in rows if f"llr/factor/{name}" in row]
    assert [row["step"] for row in measured] == [1, 3, 5]
    exponents = {k.removeprefix("llr/exponent/"): v for k, v in measured[0].items() if "llr/exponent" in k}
    least, largest = min(exponents.values()), max(exponents.values())
    factor = 1 + 4 * (exponents[name] - least) / (largest - least)
    assert measured[0][f"llr/factor/{name}"] == pytest.approx(factor)
    base = rows[0]["lr/base/no_decay"]
    assert rows[0][group] == pytest.approx(base * (1 + (factor - 1) / 3))
    assert rows[0]["lr/base/token_embedding/no_decay"] == pytest.approx(base * (1 + 4 / 3))
    assert rows[7][group] == pytest.approx(
        rows[7]["lr/base/no_decay"] * measured[2][f"llr/factor/{name}"], rel=1e-9, abs=1e-12
    )


def test_turned_on_after_its_last_measurement_it_measures_once(small_folder, tmp_path):
    plain = ["--validation.every", "0", "--name", "it", "--steps"]
    assert run_distributed(session, 1, nano_run(small_folder, tmp_path, *plain, "6"))[0][1] is None
    late = nano_run(small_folder, tmp_path, *LLR.split(), "--llr.until", "0.2", *plain, "9")
    assert run_distributed(session, 1, late)[0][1] is None
    rows = curve(late.folder)
    assert [row["step"] for row in rows if any("llr/factor" in name for name in row)] == [7]
    assert rows[8]["lr/base/token_embedding/no_decay"] > 2 * rows[8]["lr/base/no_decay"]


def test_factors_stay_with_their_matrices_under_new_rules(small_folder, tmp_path):
    flags = f"{LLR} --validation.every 0 --name it --steps".split()
    assert run_distributed(session, 1, nano_run(small_folder, tmp_path, *flags, "8"))[0][1] is None
    rule = ("--lr_rules", "[{name: slow, parameters: [q, k], scale: 0.9}]")
    longer = nano_run(small_folder, tmp_path, *flags, "10", *rule)
    assert run_distributed(session, 1, longer)[0][1] is None
    before, after = curve(longer.folder)[7:9]
    for matrix in ("layers.1.attention.q", "layers.3.attention.k"):
        factor = before[f"lr/base/{matrix}/decay"] / before["lr/base/no_decay"]
        now = after[f"lr/slow/{matrix}/decay"] / after["lr/base/no_decay"]
        assert factor > 1.01 and now == pytest.approx(0.9 * factor)


def test_other_settings_are_a_reason_to_measure(small_folder, tmp_path):
    """As is being turned on again, also after the last measurement."""
    flags = f"{LLR} --llr.until 2 --llr.transition 0 --validation.every 0 --name it --steps".split()
    given = ([], ["--llr.high", "2.0"], ["--llr.high", "2.0"], ["--llr.apply", "none"], ["--llr.high", "2.0"])
    for steps, more in enumerate(given, 4):
        run = nano_run(small_folder, tmp_path, *flags, str(steps), *more)
        assert run_distributed(session, 1, run)[0][1] is None
    rows = curve(run.folder)
    assert [row["step"] for row in rows if any("llr/factor" in name for name in row)] == [1, 3, 5, 8]
    embedding, base = "lr/base/token_embedding/no_decay", "lr/base/no_decay"
    assert [round(row[embedding] / row[base], 6) for row in rows if embedding in row] == [5] * 4 + [2] * 3
