"""Plans of a study's size, from planted pilots."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from model.errors import UserError
from pretrain.study.power import costs, window_losses
from pretrain.study.power.plan import power_report
from pretrain.study.power.spread import spread_of
from pretrain.study.power.text import report_lines
from pretrain.study.power.window_losses import variances, window_variance
from pretrain.study.results import RunResult
from pretrain.study.scheduler import planned_flops
from pretrain.study.statistics import detectable_effect, pairs_needed, pooled_sd
from pretrain.study.study_file import parse_study

TEXT = """
recipe: micro
settings: {steps: 50}
seeds: 3
effect: 0.02
hours: 2
machine: 2 CPU cores
baseline: uniform
variants: {uniform: {heads: 8x4}, prism: {}, descending: {heads: "8,8,4,2"}, again: {heads: 8x4, seed_shift: 1000}}
"""
LOSSES = {
    "uniform": [4.00, 4.10, 4.30],
    "prism": [3.99, 4.07, 4.28],
    "descending": [4.04, 4.13, 4.31],
    "again": [4.30, 4.05, 4.01],
}
"""Last validation loss by seed."""
SCHEDULES = ["1x4", "2x4", "4x4", "16x4", "32x4"]
PAIRED = [[-0.01, -0.03, -0.02], [0.04, 0.03, 0.01]]


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    """As the planted pilots."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def pilot(folder, text=TEXT, losses=LOSSES, validations=1, seconds=30.0):
    """A study's folder, and finished runs with these losses. Earlier validations are 1 higher."""
    folder.mkdir(exist_ok=True)
    (folder / "study.yaml").write_text(text)
    study = parse_study(text, folder.name, folder)
    results = []
    for planned in study.runs:
        given = losses[planned.variant]
        if planned.seed > len(given):
            results.append(RunResult(planned, folder / planned.name, "missing"))
            continue
        rows = [
            {
                "step": 10 * number,
                "tokens": 1000 * number,
                "val_loss": given[planned.seed - 1] + (number < validations),
            }
            for number in range(1, validations + 1)
        ]
        rows[-1] |= {"step": 50, "seconds": seconds}
        world = {"device": "cpu"}
        results.append(RunResult(planned, folder / planned.name, "finished", rows, world=world))
    return study, (folder, results)


@pytest.fixture
def made(tmp_path):
    return pilot(tmp_path / "pilot")


def plan(study, pilots=(), sd=None, effect=None, **more):
    return power_report(study, pilots, sd=sd, effect=effect, **more)


def power_lines(study, pilots=(), **more):
    return report_lines(plan(study, pilots, **more))


def ways(report):
    return {way.name: way for way in report.ways}


# ---------------------------------------------------------------------- spread


def test_spread_and_seeds(made):
    study, found = made
    report = plan(study, [found])
    sd = pooled_sd(PAIRED)  # squares of 2 and 4 2/3 hundredths², of 4 degrees of freedom
    assert report.sd == pytest.approx(sd) and sd == pytest.approx(0.01 * (20 / 12) ** 0.5)
    assert report.pilots[0].pairs == 6
    assert report.pilots[0].degrees == pytest.approx(4 * 4 / 5)  # two variants share their baseline
    limits = [sd * (3.2 / stats.chi2.ppf(share, 3.2)) ** 0.5 for share in (0.975, 0.025)]
    assert [report.sd_low, report.sd_high] == pytest.approx(limits)
    assert report.needed == pairs_needed(0.02, sd) and report.needed_low <= report.needed < report.needed_high
    assert report.detectable == pytest.approx(detectable_effect(sd, 3))
    assert plan(study, [found], effect=0.005).needed == pairs_needed(0.005, sd)
    assert plan(study, [found], target_power=0.9).needed == pairs_needed(0.02, sd, 0.9)


def test_what_common_random_numbers_gain(made):
    study, found = made
    report = plan(study, [found])
    variance = {name: np.var(values, ddof=1) for name, values in LOSSES.items()}
    unpaired = ((variance["prism"] + variance["descending"]) / 2 + variance["uniform"]) ** 0.5
    way = ways(report)["last value, any seeds"]
    assert way.sd == pytest.approx(unpaired) and way.ratio == pytest.approx(unpaired / report.sd)
    assert way.needed == pairs_needed(0.02, unpaired) and way.pairs == 9
    assert report.pilots[0].gain == pytest.approx(report.sd / unpaired)


def test_a_variant_that_spreads_more_has_a_row_without_it(tmp_path, made):
    names = ["a", "b", "c", "d", "loud"]
    variants = ", ".join(f"{name}: {{heads: {heads}}}" for name, heads in zip(names, SCHEDULES, strict=True))
    text = TEXT[: TEXT.index("variants")] + f"variants: {{uniform: {{heads: 8x4}}, {variants}}}\n"
    losses = {
        "uniform": [4.0, 4.0, 4.0],
        **{key: [3.99, 4.0, 4.02] for key in names},
        "loud": [3.5, 4.0, 4.5],
    }
    study, found = pilot(tmp_path / "loud", text, losses)
    report = plan(study, [found], effect=0.02)
    way = ways(report)["last value, without loud"]
    quiet = np.std([-0.01, 0.0, 0.02], ddof=1)
    assert way.pairs == 12 and way.sd == pytest.approx(quiet) and way.needed == pairs_needed(0.02, quiet)
    assert any("differences of loud spread more" in note for note in report.notes)
    assert not any("without" in name for name in ways(plan(*[made[0], [made[1]]])))


def test_pairs_of_other_seeds_are_named_and_do_not_count(made):
    study, found = made
    report = plan(study, [found])
    assert set(report.pilots[0].differences) == {"prism", "descending"}
    way = ways(report)["other seeds: again"]
    assert way.sd == pytest.approx(np.std([0.30, -0.05, -0.29], ddof=1)) and way.pairs == 3
    (line,) = [line for line in power_lines(study, [found], sd=None, effect=None) if "not paired" in line]
    assert line.strip() == "not paired in anything, and not in the spread: again (3 pairs of other seeds)"


def test_means_of_the_last_validations_as_far_as_there_are(tmp_path):
    study, (folder, results) = pilot(tmp_path / "pilot", validations=4)
    assert list(plan(study, [(folder, results)]).pilots[0].averages) == [1, 2, 3]
    for run in results:  # an earlier validation that is noisier than the last
        run.rows[-2]["val_loss"] += 0.1 * (run.variant == "prism") * run.seed
    found = ways(plan(study, [(folder, results)]))
    prism = [(difference + difference + 0.1 * seed) / 2 for seed, difference in enumerate(PAIRED[0], start=1)]
    assert found["mean of the last 2"].sd == pytest.approx(pooled_sd([prism, PAIRED[1]]))
    assert found["mean of the last 2"].ratio == pytest.approx(
        found["mean of the last 2"].sd / pooled_sd(PAIRED)
    )
    assert found["last value"].ratio == 1
    text = TEXT.replace("steps: 50", "steps: 50, validation: {every: 10}")
    averaged = parse_study(text + "last_validations: 2\n", "pilot", folder)
    assert plan(averaged, [(folder, results)]).sd == found["mean of the last 2"].sd


def test_a_run_without_so_many_validations_leaves_the_row_out(tmp_path):
    study, (folder, results) = pilot(tmp_path / "pilot", validations=3)
    results[1].rows[:] = results[1].rows[-2:]
    assert list(plan(study, [(folder, results)]).pilots[0].averages) == [1, 2]


def test_several_pilots_have_rows_each_and_the_first_counts(made, tmp_path):
    study, first = made
    closer = {name: [1 + loss / 10 for loss in losses] for name, losses in LOSSES.items()}
    _, second = pilot(tmp_path / "longer", losses=closer)
    report = plan(study, [first, second])
    by_source = {way.source: way.sd for way in report.ways if way.name == "last value"}
    assert by_source == pytest.approx({str(first[0]): report.sd, str(second[0]): report.sd / 10})
    assert report.sd_source == str(first[0])


def test_contrasts_have_rows(tmp_path, made):
    """Those of the pilot, and those of the study that is planned of which the pilot has the variants."""
    own = "contrasts: {order: {plus: [prism], minus: [descending]}}\n"
    _, found = pilot(tmp_path / "own", TEXT + own)
    more = "contrasts: {mean: {plus: [prism, descending], minus: [uniform]}, far: {plus: [wide], minus: [uniform]}}\n"
    wide = TEXT.replace("prism: {}", "prism: {}, wide: {heads: 16x4}")
    study = parse_study(wide + more, "planned", tmp_path / "planned")
    rows = ways(plan(study, [found]))
    order = [first - second for first, second in zip(*PAIRED, strict=True)]
    mean = [(first + second) / 2 for first, second in zip(*PAIRED, strict=True)]
    assert (
        rows["contrast order"].sd == pytest.approx(np.std(order, ddof=1))
        and rows["contrast order"].pairs == 3
    )
    assert rows["contrast mean"].sd == pytest.approx(np.std(mean, ddof=1))
    assert rows["contrast mean"].needed == pairs_needed(0.02, float(np.std(mean, ddof=1)))
    assert "contrast far" not in rows and not any(
        "contrast" in name for name in ways(plan(made[0], [made[1]]))
    )


def test_a_stated_spread_comes_before_the_pilots(made):
    study, found = made
    report = plan(study, [found], sd=0.05)
    assert (report.sd, report.sd_source, report.needed_low) == (0.05, "stated", None)
    assert [way.source for way in report.ways[:2]] == ["stated", str(found[0])]


def test_comparisons_are_spread_apart(tmp_path):
    """The mean difference of each variant of each comparison is its own."""
    text = """
settings: {steps: 50}
seeds: 2
comparisons:
  small: {recipe: micro, baseline: a, variants: {a: {heads: 8x4}, b: {heads: 4x4}, c: {heads: 2x4, against: b}}}
  large: {recipe: tiny, baseline: a, variants: {a: {}, b: {model: uniform-tiny}}}
"""
    study, (folder, results) = pilot(
        tmp_path / "two", text, {"a": [1.0, 2.0], "b": [5.0, 6.2], "c": [0.0, 1.5]}
    )
    found = spread_of(study, folder, results, "val_loss", 1)
    assert found.differences == {
        "small: b": pytest.approx([4.0, 4.2]),
        "small: c": pytest.approx([-5.0, -4.7]),
        "large: b": pytest.approx([4.0, 4.2]),
    }
    # Half the squared distance of two differences is their variance.
    small, large = ((0.2**2 + 0.3**2) / 2 / 2) ** 0.5, 0.2 / 2**0.5
    assert found.by_comparison == {"small": (4, pytest.approx(small)), "large": (2, pytest.approx(large))}
    rows = ways(plan(study, [(folder, results)]))
    assert (rows["last value, large"].pairs, rows["last value, large"].sd) == (2, pytest.approx(large))
    assert rows["last value, small"].ratio == pytest.approx(small / found.sd)


def test_a_loss_that_is_not_finite_is_left_out_and_said(tmp_path):
    losses = LOSSES | {"prism": [3.99, math.nan, 4.28]}
    study, found = pilot(tmp_path / "pilot", losses=losses)
    report = plan(study, [found])
    assert report.sd == pytest.approx(pooled_sd([[-0.01, -0.02], PAIRED[1]]))
    assert report.notes == (f"{found[0]}: prism: 1 pairs left out, which are not finite numbers",)


# ---------------------------------------------------------------------- costs


def test_hours_from_the_pilots_speed(made):
    study, found = made
    planned = study.runs[0]
    model = planned.run.build_model_config()
    flops = model.flops_per_token() * 50 * planned.run.global_batch_tokens
    assert planned_flops(planned) == flops
    report = plan(study, [found], parallel=2).costs
    total = sum(map(planned_flops, study.runs))
    rates = [planned_flops(run) / 30 for run in study.runs]
    assert report.rate == pytest.approx(np.median(rates)) and "pilot on cpu" in report.rate_source
    assert report.total == total and report.hours == pytest.approx(total / np.median(rates) / 2 / 3600)
    assert report.fitting == math.floor(3 * 2 / report.hours)
    assert (report.runs, report.upper_bound) == (12, False)


def test_sizes_scale_with_the_seeds(made):
    study, found = made
    report = plan(study, [found])
    by_reason = {reason: size for size in report.sizes for reason in size.reasons}
    assert by_reason["this study"].seeds == 3 and by_reason["finds the effect"].seeds == report.needed
    fits = by_reason["fits the budget"]
    assert fits.hours <= 2 < fits.hours * (fits.seeds + 1) / fits.seeds
    assert fits.flops == pytest.approx(report.costs.total * fits.seeds / 3)
    assert fits.detectable == detectable_effect(report.sd, fits.seeds)


def test_without_pilots_the_speed_is_assumed_and_said_to_be(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "machine_rate", lambda: (1e12, "a guess, not measured: x", False))
    study = parse_study(TEXT.replace("hours: 2", "hours: 0.001"), "s", tmp_path)
    report = plan(study, sd=0.01, parallel=4)
    assert report.costs.hours == pytest.approx(report.costs.total / 1e12 / 3600 / 4)
    lines = power_lines(study, [], sd=0.01, effect=None)
    assert any("a guess, not measured" in line for line in lines)
    assert any(line.startswith("budget   0.001 h on 2 CPU cores") for line in lines)


def test_runs_at_a_time_share_one_processor(tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain.runtime.hardware.peak_flops", lambda device, dtype: (1e12, "a test"))
    study = parse_study(TEXT, "s", tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    report = plan(study, sd=0.01, parallel=4).costs
    assert report.rate == pytest.approx(0.06e12) and report.at_a_time == 1
    assert report.rate_source.startswith("a guess, not measured: 6% of the peak of 1.00e+12 FLOP/s")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("steps: 50", None),
        ("steps: 140", None),
        (
            "steps: 160",
            "its runs take 4.23e+11 FLOPs, those of s 1.35e+12: spread and speed may not carry over",
        ),
        (
            "steps: 10",
            "its runs take 4.23e+11 FLOPs, those of s 8.46e+10: spread and speed may not carry over",
        ),
    ],
)
def test_a_pilot_of_another_size_is_said(made, tmp_path, change, said):
    _, found = made
    study = parse_study(TEXT.replace("steps: 50", change), "s", tmp_path)
    assert plan(study, [found]).notes == ((f"{found[0]}: {said}",) if said else ())


def test_a_pilot_of_another_device_is_said(made):
    study, (folder, results) = made
    for run in results:
        run.world["device"] = "cuda"
    assert plan(study, [(folder, results)]).notes == (
        f"{folder}: its runs were on cuda, and this machine has cpu: speed will not carry over",
    )


def test_growth_is_an_upper_bound(tmp_path, made):
    _, found = made
    growing = """
recipe: micro
settings: {steps: 50}
seeds: 1
baseline: fixed
variants:
  fixed: {heads: 8x4}
  grown: {growth: {criterion: schedule, maximum: 8, schedule: {1: 2x4, 10: 8x4}}}
"""
    study = parse_study(growing, "s", tmp_path)
    report = plan(study, [found], sd=0.01)
    assert report.costs.upper_bound and report.costs.most == report.costs.least
    assert any("upper bound" in line for line in power_lines(study, [found], sd=0.01, effect=None))


# ---------------------------------------------------------------------- text and refusals


def test_the_lines(made):
    study, found = made
    lines = power_lines(study, [found], sd=None, effect=None)
    text = "\n".join(lines)
    assert lines[0].startswith(
        "spread   sd 0.0129 (95 % interval 0.00741 to 0.0451) of paired differences of val_loss"
    )
    assert "6 pairs of 2 variants" in lines[0]
    assert lines[1].startswith(
        "needed   6 seeds (4 to 42 over the interval of the spread) to find 0.02 with a power"
    )
    assert lines[2] == "finds    with the 3 seeds of pilot: 0.0421 or more"
    for expected in (
        "pairing  common random numbers",
        "cost     12 runs",
        "budget   2 h on 2 CPU cores",
        "seeds  ",
    ):
        assert expected in text
    enough = power_lines(study, [found], sd=0.001, effect=None)
    assert enough[2].endswith("0.00326 or more, so the effect")


def test_without_an_effect_only_what_is_detectable(tmp_path):
    study, found = pilot(tmp_path / "pilot", TEXT.replace("effect: 0.02\n", ""))
    report = plan(study, [found])
    assert report.effect is None and report.needed is None
    lines = power_lines(study, [found], sd=None, effect=None)
    assert lines[1] == "needed   not known: the study names no effect; give --effect"
    assert not any("seeds to find" in line for line in lines)
    assert plan(study, [found], effect=0.02).needed == 6


def test_one_seed_finds_nothing(made):
    _, found = made
    one = parse_study(TEXT.replace("seeds: 3", "seeds: 1"), "one", found[0])
    assert any("nothing: one pair" in line for line in power_lines(one, [found], sd=None, effect=None))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"pilots": ()}, "pilot: none is not valid without --sd"),
        ({"effect": 0.0}, "effect: 0 is not valid; give a number above 0"),
        ({"effect": -0.1}, "effect: -0.1 is not valid"),
        ({"effect": math.nan}, "effect: nan is not valid"),
        ({"sd": 0.0}, "sd: 0 is not valid"),
        ({"target_power": 1.0}, "power: 1 is not valid; give a number between 0.05 and 1"),
        ({"target_power": 0.05}, "power: 0.05 is not valid"),
        ({"pilots": (), "sd": 0.1, "windows": 8}, "windows: 8 is not valid without a pilot"),
        ({"windows": 1}, "windows: 1 is not valid"),
    ],
)
def test_refusals(made, more, said):
    study, found = made
    with pytest.raises(UserError) as error:
        plan(**{"study": study, "pilots": [found], **more})
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("count", [0, 1])
def test_a_pilot_with_too_few_pairs(tmp_path, count):
    losses = {name: values[:count] for name, values in LOSSES.items()} | {"again": LOSSES["again"]}
    study, found = pilot(tmp_path / "pilot", losses=losses)
    pairs = 2 * count  # one of each variant, and so no spread
    with pytest.raises(
        UserError, match=f"is not valid, with {pairs} finished pairs .*two or more seeds finished"
    ):
        plan(study, [found])
    assert plan(study, [found], sd=0.01).needed == 5, "for the speed it will do"


def test_windows_are_of_losses(made):
    _, found = made
    with pytest.raises(UserError, match="windows: 8 is not valid with measure val_bpb"):
        plan(parse_study(TEXT + "measure: val_bpb\n", "s", found[0]), [found], windows=8)


# ---------------------------------------------------------------------- windows


def test_windows_of_a_pilot(made, monkeypatch):
    study, (folder, results) = made
    generator = np.random.default_rng(2)
    losses = {run.folder: generator.normal(4, 1, 64) for run in results}
    read = []

    def measured(run, windows, progress):
        read.append(run.folder.name)
        progress(1, 2)
        # The prism runs read other windows than their baseline.
        inputs = np.full((64, 3), 1 if run.variant == "prism" else 0)
        return inputs, losses[run.folder], "held-out text of a test"

    monkeypatch.setattr(window_losses, "_losses", measured)
    done = []
    report = plan(study, [(folder, results)], windows=64, progress=lambda *counts: done.append(counts))
    assert len(read) == 9 == len(set(read)), "a baseline once, and no run of other seeds"
    assert done[0] == (32, 576) and done[-1] == (544, 576)
    by_name = {run.folder.name: losses[run.folder] for run in results}
    differences = np.stack(
        [by_name[f"descending-s{seed}"] - by_name[f"uniform-s{seed}"] for seed in (1, 2, 3)]
    )
    own, common = variances([differences])
    windows = report.pilots[0].windows
    assert (windows.own, windows.common, windows.validated) == (own, common, 64)
    validated = study.runs[0].run.validation.sequences
    assert windows.windows == 64 and validated >= 64
    assert any("prism and its baseline read other windows" in note for note in report.notes)
    way = ways(report)["4 x as many windows (256)"]
    assert way.sd == pytest.approx(max(0, report.sd**2 - own / 64 * 0.75) ** 0.5)
    lines = power_lines(study, [(folder, results)], sd=None, effect=None, windows=64)
    assert any(line.startswith("windows  64 windows are") for line in lines)


def test_windows_that_say_nothing_are_said_to(made, monkeypatch):
    study, (folder, results) = made
    one = np.zeros((1, 3)), np.ones(1), "a test"
    monkeypatch.setattr(window_losses, "_losses", lambda run, windows, progress: one)
    report = plan(study, [(folder, results)], windows=8)
    assert report.notes == (f"{folder}: no variant has two pairs that read the same windows",)
    assert not any("as many windows" in way.name for way in report.ways)


def test_no_pairs_no_windows(tmp_path):
    study, (_, results) = pilot(
        tmp_path / "one", losses={name: values[:1] for name, values in LOSSES.items()}
    )
    assert window_variance(study, results, 8) is None
