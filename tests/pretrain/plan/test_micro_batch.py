"""How a global batch is cut up, and what is said when it cannot be."""

import sys

import pytest

from model.errors import UserError
from model.presets import preset
from pretrain.engine.batch import BatchPlan, valid_micro_batches
from pretrain.engine.ds_config import EngineSettings
from pretrain.plan.memory import memory_plan
from pretrain.plan.micro_batch import memory_limits, plan_batch, usable_memory

GIB = 1 << 30
MODEL = preset("prism-124m")


def test_accumulation_follows():
    plan = plan_batch(262144, 8, MODEL, data_parallel=8, memory=80 * GIB, device_type="cuda")
    assert plan == BatchPlan(sequences=256, micro_batch=8, accumulation=4, data_parallel=8)


def test_chosen_micro_batch_divides_and_grows_with_memory():
    small = plan_batch(262144, None, MODEL, 4, 8 * GIB, "cuda")
    large = plan_batch(262144, None, MODEL, 4, 80 * GIB, "cuda")
    assert 64 % small.micro_batch == 0 and 64 % large.micro_batch == 0
    assert 1 <= small.micro_batch < large.micro_batch <= 64
    plan = memory_plan(MODEL, EngineSettings(), 4, large.micro_batch, large.accumulation)
    assert plan.peak <= usable_memory(80 * GIB, "cuda")


def test_never_below_one_sequence():
    assert plan_batch(1024, None, MODEL, 1, GIB // 4, "cuda").micro_batch == 1


@pytest.mark.parametrize(
    ("tokens", "micro", "ranks", "message"),
    [
        (1000, None, 1, r"1000 is not a multiple of the context length 1024; nearest are 1024 and 2048"),
        (6144, None, 4, r"6 sequences .* 4 data-parallel ranks; valid .* \[1, 2, 3, 6\] .* 4096 or 8192"),
        (6144, 2, 4, r"6 sequences .* valid .* \[1, 3\] .* 8192 or 16384"),
        (1000, 2, 3, r"nearest are 6144 and 12288"),
        (8192, 3, 2, r"micro_batch: 3 does not divide the 4 sequences .*valid values are \[1, 2, 4\]"),
    ],
)
def test_what_does_not_divide(tokens, micro, ranks, message):
    with pytest.raises(UserError, match=message):
        plan_batch(tokens, micro, MODEL, ranks, 80 * GIB, "cuda")


def test_a_growing_run_has_a_micro_batch_of_every_head_count():
    """126 positions are no multiple of 4: at 3 heads two ranks split micro-batches, at 4 they need not."""
    model = preset("prism-nano").replace(context_length=126, heads=(4, 4, 4, 4))
    assert plan_batch(27 * 126, None, model, 1, 80 * GIB, "cuda", 2, EngineSettings()).micro_batch == 27
    with pytest.raises(UserError, match=r"27 sequences .* 2 tensor-parallel ranks .* a multiple of 252$"):
        plan_batch(27 * 126, None, model, 1, 80 * GIB, "cuda", 2, EngineSettings(grows=True))
    assert valid_micro_batches(54, model, 2, grows=True) == [2, 6, 18, 54]


def test_a_model_that_a_cpu_cannot_hold():
    """It would end in the system's out-of-memory kill; a GPU says itself that it is full."""
    huge = MODEL.replace(ffn_width=3_000_000)
    with pytest.raises(UserError, match=r"model: [\d,]+ parameters \(.*FFN width 3000000\) need [\d,.]+ GiB"):
        plan_batch(1024, None, huge, 1, 16 * GIB, "cpu")
    assert plan_batch(1024, None, MODEL, 1, 16 * GIB, "cpu").micro_batch == 1


@pytest.mark.parametrize(
    ("groups", "files", "variables", "least"),
    [
        ("0::/job/step", {"job/memory.max": "5000", "job/step/memory.max": "max"}, {}, 5000),
        ("0::/job/step", {"job/memory.max": "5000", "job/step/memory.max": "400"}, {}, 400),
        ("0::/elsewhere", {"memory.max": "300"}, {}, 300),  # as a container sees it
        ("4:memory:/a/b\n0::/", {"memory/a/memory.limit_in_bytes": "77"}, {}, 77),
        ("4:cpu,memory:/x", {"memory/memory.limit_in_bytes": "66"}, {}, 66),
        ("", {}, {"SLURM_MEM_PER_NODE": "3"}, 3 << 20),
        ("", {}, {"SLURM_MEM_PER_CPU": "2", "SLURM_CPUS_ON_NODE": "4"}, 8 << 20),
        ("", {}, {"SLURM_MEM_PER_NODE": "0"}, sys.maxsize),  # the whole node
        ("junk", {}, {"SLURM_MEM_PER_NODE": "x"}, sys.maxsize),
    ],
)
def test_the_memory_that_a_job_may_use(monkeypatch, tmp_path, groups, files, variables, least):
    for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "proc").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert min(memory_limits(tmp_path / "proc", tmp_path / "cgroup")) == least
