"""Any shape of the world saved, any other loaded: the same bits, and the run goes on as if nothing had
changed."""

import itertools
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch

from pretrain.checkpoint.loader import load_checkpoint
from pretrain.checkpoint.manifest import verify
from pretrain.checkpoint.sharded_files import ShardedFiles
from tests.helpers import shapes
from tests.helpers.covering import covering_array
from tests.helpers.distributed import run_distributed
from tests.helpers.marks import slow
from tests.helpers.shapes import (
    ODD_MODEL,
    SEQUENCES,
    Shape,
    build,
    contents,
    differences,
    fit,
    gathered,
    load_and_gather,
    newest,
    same_bits,
    shape_run,
    train,
)
from tests.helpers.training import ROOT, curve, interrupted, nano_run, session

PRECISIONS = ("fp32", "bf16")
SHAPES = [Shape(ranks, stage, dtype) for dtype in PRECISIONS for ranks in (1, 2) for stage in (1, 2, 3)]


@pytest.fixture(scope="module")
def saved(small_folder, tmp_path_factory):
    """A finished run of the odd model in a shape; trained when first asked for."""
    runs = {}

    def get(shape):
        key = repr(shape)  # settings of zero_optimization may be dicts
        if key not in runs:
            folder = tmp_path_factory.mktemp(str(shape))
            runs[key] = train(small_folder, folder, shape, *ODD_MODEL)
        return runs[key]

    return get


def load(source, shape, folder):
    """Load a copy of a saved run in another shape and save it again under *folder*/again."""
    runs, degrees = folder / "copy", {"tensor_parallel": shape.tensor_parallel}
    degrees["context_parallel"] = shape.context_parallel
    shutil.copytree(source.run.folder, runs / source.run.folder.name)
    run = replace(source.run, runs_dir=str(runs), precision=shape.precision, **degrees)
    results = run_distributed(load_and_gather, shape.ranks, run, shape, folder / "again", timeout=400)
    return shapes.joined(results, shapes.VOCABULARY_ROWS)


def check_loaded(source, shape, folder):
    found = load(source, shape, folder)
    before = contents(source.checkpoint)
    assert differences(contents(newest(folder / "again")), before) == []
    if not dict(shape.zero).get("round_robin_gradients"):
        assert differences(found["parameters"], before) == []
    for name, tensors in found["parameters"].items():
        assert same_bits(tensors["weight"], before[name]["fp32"].to(tensors["weight"].dtype)), name
    assert found["groups"] == source.reference["groups"]
    assert found["steps"] == source.reference["steps"] == {3}
    assert found["counters"] == (3, 3 * SEQUENCES, 0)
    if source.shape._replace(zero=()) != shape._replace(zero=()):
        assert found["notes"][0].startswith("resharded: ")


def tensor_parallel(ranks, t, stage, precision="fp32"):
    return Shape(ranks, stage, precision, tensor_parallel=t)


# Pairs that differ in stage, ranks, precision and degree; more are in the slow tests.
PAIRS = [
    (Shape(1, 1), Shape(2, 2)),
    (Shape(2, 2), Shape(1, 3)),
    (Shape(2, 3), Shape(1, 2)),
    (Shape(2, 3, "bf16"), Shape(1, 1, "bf16")),
    (Shape(2, 2), tensor_parallel(3, 3, 3)),
    (Shape(2, 3, context_parallel=2), Shape(1, 1)),
    (Shape(2, 2), Shape(2, 1, context_parallel=2)),
]
QUICK = dict.fromkeys(source for source, _ in PAIRS)
SLOW = [
    (Shape(1, 1, "bf16"), Shape(2, 3, "bf16")),
    (Shape(2, 2, "bf16"), Shape(1, 3, "fp32")),
    (Shape(1, 2), Shape(1, 2, "bf16")),
    (tensor_parallel(3, 3, 1, "bf16"), Shape(2, 3, "bf16")),
    (Shape(6, 1, "bf16", tensor_parallel=3, context_parallel=2), Shape(2, 3, "bf16")),
    (Shape(2, 3, "bf16"), Shape(6, 2, "bf16", tensor_parallel=3, context_parallel=2)),
]


def documented_reader():
    """The function of docs/checkpoints.md that reads a parameter with json and safetensors alone."""
    text = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import json\n.*?)```", text, re.DOTALL)
    assert len([*filter(None, code.splitlines())]) <= 15 and "pretrain" not in code
    names = {}
    exec(code, names)
    return names["read"]


OTHERS = slow(shape for shape in SHAPES if shape not in QUICK)


@pytest.mark.parametrize("shape", [*QUICK, *OTHERS], ids=str)
def test_files_are_what_the_engine_held(saved, shape):
    source = saved(shape)
    found = contents(source.checkpoint)
    assert differences(found, source.reference["parameters"]) == []
    assert {tensors["step"] for tensors in found.values()} == source.reference["steps"] == {3}
    read = documented_reader()
    for name, tensors in found.items():
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            assert same_bits(read(source.checkpoint, name, key), tensors[key]), (name, key)


@pytest.mark.parametrize(("source", "target"), [*PAIRS, *slow(SLOW)], ids=str)
def test_loaded_is_what_was_saved(saved, tmp_path, source, target):
    check_loaded(saved(source), target, tmp_path)


# Degrees that do not divide the odd model's widths, with data parallelism beside them: the small preset
# instead.
GRIDS = [Shape(2, 2), *(tensor_parallel(*grid) for grid in ((2, 2, 1), (4, 2, 3), (4, 2, 2), (4, 4, 1)))]


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_tensor_and_data_parallel(small_folder, tmp_path, precision):
    """Each grid's checkpoint is what its engine held; each loads the one before, all the way round."""
    grids = [shape._replace(precision=precision) for shape in GRIDS]
    plain = ["--global_batch_tokens", str(64 * SEQUENCES), "--micro_batch", "2"]
    runs = [train(small_folder, tmp_path / str(shape), shape, *plain) for shape in grids]
    for source in runs:
        assert differences(contents(source.checkpoint), source.reference["parameters"]) == []
    for source, shape in zip(runs, grids[1:] + grids[:1], strict=True):
        check_loaded(source, shape, tmp_path / f"to-{shape}")


# Every two changes of precision, ranks and stage together.
CHANGES = {
    name: [f"{one} {other}" for one, other in itertools.product(levels, repeat=2)]
    for name, levels in {"ranks": "12", "stage": "123", "precision": PRECISIONS}.items()
}
RESHAPED = [
    tuple(Shape(int(ranks), int(stage), dtype) for ranks, stage, dtype in pair)
    for changes in covering_array(CHANGES, (), 1)
    if len(set(pair := [*zip(*map(str.split, changes.values()), strict=True)])) == 2
]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), RESHAPED, ids=str)
def test_shapes_load_each_other(saved, tmp_path, source, target):
    check_loaded(saved(source), target, tmp_path)


def train_then_load(run, shape, folder):
    """Train another run, then load *folder* into its engine."""
    session = build(run, shape)
    engine = fit(session)
    load_checkpoint(engine, folder, session.world)
    found = gathered(engine)
    return found if torch.distributed.get_rank() == 0 else None


@pytest.mark.slow
@pytest.mark.parametrize("shape", [Shape(2, 3, "bf16"), *slow([Shape(1, 2, "bf16")])], ids=str)
def test_an_engine_that_has_trained_takes_a_checkpoint(saved, small_folder, tmp_path, shape):
    """Nothing of the engine's own stays: not in weights that it holds gathered, nor in moments and steps."""
    source = saved(Shape(2, 1, "bf16"))
    run = shape_run(small_folder, tmp_path, shape, *ODD_MODEL, "--seed", "9", "--steps", "5")
    found = run_distributed(train_then_load, shape.ranks, run, shape, source.checkpoint, timeout=120)[0]
    assert differences(found["parameters"], source.reference["parameters"]) == []
    for name, tensors in found["parameters"].items():
        assert same_bits(tensors["weight"], source.reference["parameters"][name]["weight"]), name
    assert found["groups"] == source.reference["groups"] and found["steps"] == {3}


# Settings that move parameters within the files of one stage.
LAYOUTS = [
    Shape(2, 3, "bf16", (("sub_group_size", 20_000),)),
    Shape(2, 1, "fp32", (("parameter_alignment", True),)),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_of_one_stage(saved, tmp_path, layout):
    source = saved(layout)
    assert differences(contents(source.checkpoint), source.reference["parameters"]) == []
    plain = layout._replace(zero=())
    check_loaded(source, plain, tmp_path / "from")
    check_loaded(saved(plain), layout, tmp_path / "to")


@pytest.mark.slow
def test_round_robin_layout(saved, tmp_path):
    """DeepSpeed 0.19.8 gathers other parameters' elements then (it ignores the order), so the reference is a
    run without: the order of the flat tensor is no matter of numbers, but for the rounding of sums."""
    robin, plain = saved(Shape(2, 2, "fp32", (("round_robin_gradients", True),))), saved(Shape(2, 2))
    found, expected = contents(robin.checkpoint), contents(plain.checkpoint)
    for name, tensors in found.items():
        assert same_bits(tensors["fp32"], robin.reference["parameters"][name]["weight"]), name
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(tensors[key], expected[name][key], rtol=1e-4, atol=1e-7)
    check_loaded(robin, plain.shape, tmp_path / "from")
    check_loaded(plain, robin.shape, tmp_path / "to")


TO_CPU = {"device": "cpu", "pin_memory": False}
OFFLOADED = [
    Shape(2, 2, "bf16", (("offload_optimizer", TO_CPU),)),
    Shape(1, 3, "fp32", (("offload_optimizer", TO_CPU), ("offload_param", TO_CPU))),
]


@pytest.mark.slow  # DeepSpeed's CPU optimizer is compiled at its first use, which takes a minute
@pytest.mark.parametrize("offloaded", OFFLOADED, ids=str)
def test_offloaded(saved, tmp_path, offloaded):
    source = saved(offloaded)
    assert differences(contents(source.checkpoint), source.reference["parameters"]) == []
    check_loaded(source, Shape(1, 1, "bf16"), tmp_path / "from")
    check_loaded(saved(Shape(2, 3)), offloaded, tmp_path / "to")


# Ranks, tensor-parallel degree and stage: every change of stage, the others up and down, back to the first.
CHAIN = [(1, 1, 1), (2, 1, 2), (1, 1, 3), (2, 2, 1), (2, 1, 3), (2, 2, 2), (1, 1, 1)]


# Losses are means over tokens; a norm is a root of squares, in which rounding does not cancel, and Adam
# spreads it. Within ten steps norms were seen 5.3e-5 (fp32) and 5.5e-2 (bf16) apart: docs/numbers.md.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "loss_tolerance", "norm_tolerance"), [("fp32", 1e-6, 1e-4), ("bf16", 1e-3, 6e-2)]
)
def test_the_curve_goes_on(small_folder, tmp_path, precision, loss_tolerance, norm_tolerance):
    def make(name):
        steps = str(2 * len(CHAIN))
        more = ["--precision", precision, "--name", name, "--steps", steps]
        return nano_run(small_folder, tmp_path, *more, "--validation.every", "4", "--checkpoint.every", "2")

    unchanged, moved = make("unchanged"), make("moved")
    assert run_distributed(session, 1, unchanged, 1, timeout=120)[0] == ([], None)
    for leg, (ranks, t, stage) in enumerate(CHAIN[:-1]):
        run = replace(moved, tensor_parallel=t)
        stops = run_distributed(interrupted, ranks, run, 2 * leg + 2, ranks, stage, timeout=120)
        assert set(stops) == {"stopped"}
    notes, error = run_distributed(session, 1, moved, 1, timeout=120)[0]
    assert error is None
    assert notes == ["resharded: ranks 2 -> 1, tensor_parallel 2 -> 1, stage 2 -> 1"]
    expected, found = curve(unchanged.folder), curve(moved.folder)
    assert [row["step"] for row in found] == list(range(1, 2 * len(CHAIN) + 1))
    for a, b in zip(expected, found, strict=True):
        for key in {"train_loss", "grad_norm", "val_loss"} & a.keys():
            tolerance = norm_tolerance if key == "grad_norm" else loss_tolerance
            assert b[key] == pytest.approx(a[key], rel=tolerance), (a["step"], key)
        for key in ("lr/base/decay", "lr/base/no_decay", "tokens", "skipped"):
            assert a[key] == b[key], (a["step"], key)
    one, other = contents(newest(unchanged.folder)), contents(newest(moved.folder))
    assert {t["step"] for t in one.values()} == {t["step"] for t in other.values()} == {2 * len(CHAIN)}


def load_and_stop(run, shape, after):
    """Load in another shape, but end as if killed once *after* pieces were read."""
    original, reads = ShardedFiles.read_shard, []

    def read_shard(self, name, *arguments):
        reads.append(name)
        if len(reads) > after:
            raise KeyboardInterrupt
        return original(self, name, *arguments)

    ShardedFiles.read_shard = read_shard
    try:
        fit(build(run, shape))
    except KeyboardInterrupt:
        return "stopped"
    finally:
        ShardedFiles.read_shard = original


def test_stopped_while_resharding(saved, tmp_path):
    source = saved(Shape(1, 2))
    shutil.copytree(source.run.folder, tmp_path / source.run.folder.name)
    run = replace(source.run, runs_dir=str(tmp_path))
    shape = Shape(2, 3)
    assert set(run_distributed(load_and_stop, 2, run, shape, 20, timeout=120)) == {"stopped"}
    assert verify(newest(run.folder)) is None
    found = run_distributed(load_and_gather, 2, run, shape, tmp_path / "again", timeout=120)[0]
    assert differences(found["parameters"], source.reference["parameters"]) == []


def test_more_ranks_than_the_old_micro_batch_allows(small_folder, tmp_path):
    """A micro-batch that no longer divides is chosen anew; the same sequences make up a step."""
    run = nano_run(small_folder, tmp_path, "--micro_batch", "8", "--steps", "4", "--checkpoint.every", "2")
    run_distributed(interrupted, 1, run, 2, 1, 1, timeout=120)
    notes, error = run_distributed(session, 2, replace(run, micro_batch=None), 1, timeout=120)[0]
    assert error is None and notes[0] == "resharded: ranks 1 -> 2"
    assert json.loads((newest(run.folder) / "state.json").read_text())["sequences"] == 4 * 8
