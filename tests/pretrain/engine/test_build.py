"""ds_configs: what is filled in, what is refused, and that every shipped one trains the same model."""

import json
from pathlib import Path

import pytest
import torch

from model.errors import UserError
from pretrain.config.command_line import parse_command_line
from pretrain.engine.batch import BatchPlan
from pretrain.engine.build import build_engine
from pretrain.engine.ds_config import merge_ds_config, resolve_bf16
from pretrain.engine.ds_config_check import read_ds_config
from pretrain.plan.micro_batch import plan_batch
from tests.distributed import run_distributed

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
SHIPPED = ["zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]


def write(tmp_path, **changes):
    config = json.loads((ROOT / "ds_configs/zero2.json").read_text())
    for key, value in changes.items():
        if value is None:
            del config[key]
        else:
            config[key] = value
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_own_nothing_of_the_run(name):
    config = read_ds_config(str(ROOT / f"ds_configs/{name}.json"))
    for key in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ):
        assert config[key] == "auto"
    assert config["bf16"] == {"enabled": "auto"}
    # Gradients accumulate and are reduced in fp32.
    assert config["data_types"]["grad_accum_dtype"] == "fp32" and config["communication_data_type"] == "fp32"


def test_auto_is_filled_from_the_run():
    run = parse_command_line(["--optimizer.gradient_clipping", "0.5"]).run
    merged = merge_ds_config(
        read_ds_config(str(ROOT / "ds_configs/zero2.json")), run, BatchPlan(32, 4, 2, 4), True
    )
    assert merged["train_batch_size"] == 32 and merged["train_micro_batch_size_per_gpu"] == 4
    assert merged["gradient_accumulation_steps"] == 2 and merged["gradient_clipping"] == 0.5
    assert merged["bf16"]["enabled"] is True
    assert "auto" not in json.dumps(merged)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduler": {"type": "WarmupLR"}}, "has a 'scheduler' block"),
        ({"optimizer": {"type": "Adam"}}, "has a 'optimizer' block"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage is 0"),
        ({"zero_optimization": None}, "zero_optimization.stage is missing"),
        ({"zero_optimization": 2}, "zero_optimization is 2"),
        ({"fp16": {"enabled": True}}, "enables fp16"),
        ({"train_batch_size": 7}, "train_batch_size is 7, but the run's global_batch_tokens makes it 32"),
        (
            {"gradient_clipping": 2.0},
            "gradient_clipping is 2.0, but the run's optimizer.gradient_clipping makes it 1.0",
        ),
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "zero_optimization.overlap_com"),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": "big"}},
            "zero_optimization.reduce_bucket_size is 'big'",
        ),
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled is 'yes'"),
    ],
)
def test_contradictions_are_refused(tmp_path, changes, message):
    run = parse_command_line([]).run
    with pytest.raises(UserError) as caught:
        config = read_ds_config(write(tmp_path, **changes))
        resolve_bf16(run, config, CPU)
        merge_ds_config(config, run, BatchPlan(32, 4, 8, 1), False)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not valid JSON"), ("[1]", "holds a list"), (None, "cannot read")]
)
def test_unreadable_file(tmp_path, text, message):
    if text is not None:
        (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_ds_config(str(tmp_path / "x.json"))


def test_precision_and_bf16():
    fp32 = parse_command_line(["--precision", "fp32"]).run
    auto = parse_command_line([]).run
    assert resolve_bf16(fp32, {"bf16": {"enabled": "auto"}}, CPU)[0] is False
    assert resolve_bf16(auto, {"bf16": {"enabled": True}}, CPU)[0] is True
    assert resolve_bf16(auto, {}, CPU)[0] is False
    with pytest.raises(UserError, match="precision: fp32 contradicts"):
        resolve_bf16(fp32, {"bf16": {"enabled": True}}, CPU)


def curve(ds_config, precision, steps=6, poison_at=None, model="prism-nano", clip=1.0):
    """Losses (mean over ranks), gradient norms, skipped updates, and the final weights' sums."""
    world = torch.distributed.get_world_size()
    rank = torch.distributed.get_rank()
    run = parse_command_line(
        [
            "--model",
            model,
            "--global_batch_tokens",
            "512",
            "--precision",
            precision,
            "--optimizer.gradient_clipping",
            str(clip),
        ]
    ).run
    config = run.build_model_config(300)
    plan = plan_batch(512, 2, config, world, 1 << 30, "cpu")
    merged = merge_ds_config(
        read_ds_config(str(ROOT / f"ds_configs/{ds_config}.json")), run, plan, precision == "bf16"
    )
    engine = build_engine(run, config, merged, CPU)
    generator = torch.Generator().manual_seed(5)
    T = config.context_length
    data = torch.randint(0, 300, (steps, plan.sequences, T + 1), generator=generator)
    losses, norms = [], []
    for step in range(steps):
        for group in engine.optimizer.param_groups:
            group["lr"] = 3e-4
        total = torch.zeros(())
        for micro in range(plan.accumulation):
            first = (micro * world + rank) * plan.micro_batch
            rows = data[step, first : first + plan.micro_batch]
            loss = engine(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
            if step == poison_at and rank == world - 1 and micro == 0:
                loss = loss * float("nan")
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / plan.accumulation / world
        torch.distributed.all_reduce(total)
        losses.append(total.item())
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms, engine.skipped_steps


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_same_curve_at_every_stage_and_world(precision):
    reference, norms, _ = run_distributed(curve, 1, "zero2", precision, timeout=120)[0]
    assert reference[-1] < reference[0]
    tolerance = {"fp32": 1e-6, "bf16": 1e-3}[precision]  # the design's bounds across stages and ranks
    for stage in ("zero1", "zero2", "zero3"):
        for world in (1, 2):
            for losses, other_norms, skipped in run_distributed(curve, world, stage, precision, timeout=120):
                assert losses == pytest.approx(reference, rel=tolerance), (stage, world)
                assert other_norms == pytest.approx(norms, rel=tolerance if precision == "fp32" else 1e-2)
                assert skipped == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_a_bad_gradient_on_one_rank_skips_the_update_on_all(stage, precision):
    for losses, norms, skipped in run_distributed(curve, 2, stage, precision, poison_at=2, timeout=120):
        assert skipped == 1
        assert all(torch.isfinite(torch.tensor(losses[:2] + losses[3:])))
        assert not torch.isfinite(torch.tensor(norms[2]))
        assert torch.isfinite(torch.tensor(norms[3]))
