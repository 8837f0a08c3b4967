"""Runs with Muon: settings and groups, resumed, resharded, grown, and the way from AdamW and back."""

import dataclasses
import json
import shutil

import pytest
import torch

from model.errors import UserError
from pretrain.checkpoint.store import CheckpointStore
from pretrain.config.command_line import parse_command_line
from pretrain.engine.ds_config import EngineSettings, check_against_run
from pretrain.engine.ds_config_check import read_ds_config
from pretrain.optim.groups import GroupRates, run_groups
from pretrain.plan.footprint import rank_parameters
from pretrain.plan.memory import memory_plan, states
from tests.helpers.distributed import run_distributed
from tests.helpers.shapes import Shape, build, contents, differences, newest, shape_run
from tests.helpers.training import broken_off, curve, fit, nano_run, session
from tests.pretrain.optim.test_muon import OFFLOAD

MUON = "--optimizer.kind muon --muon.heads each"
ODD = "--architecture.d_model 48 --heads 3x1,1x1,6x1,4x1 --architecture.ffn_width 96"
RULE = "--lr_rules [{name:\\ slow,parameters:\\ [q,embedding],freeze:\\ true,hold:\\ 3}]"


def parsed(*flags):
    return parse_command_line(
        ["--config", "micro", "--model", "prism-nano", *(part for flag in flags for part in flag.split())]
    ).run


def test_groups_and_their_rates():
    rules = json.dumps([{"name": "slow", "parameters": ["q", "output", "norm"], "scale": 0.5}])
    rates = "--steps 10 --schedule.warmup 0 --optimizer.learning_rate 1e-3 --muon.learning_rate 0.02"
    untied = "--architecture.tie_embeddings false --optimizer.kind muon"
    run = parse_command_line(["--model", "prism-nano", *f"{rates} {untied}".split(), "--lr_rules", rules]).run
    model = run.build_model_config()
    groups = {group.name: group for group in run_groups(run, model)}
    names = ["base/muon", "base/no_decay", "slow/muon", "slow/decay", "slow/no_decay"]
    assert list(groups) == names
    assert groups["slow/decay"].parameters == ("output.weight",)
    assert groups["base/no_decay"].parameters == ("token_embedding.weight",)
    assert set(groups["slow/muon"].parameters) == {f"layers.{n}.attention.q.weight" for n in range(4)}
    assert len(groups["base/muon"].parameters) == 4 * 6
    written = {name: GroupRates(list(groups.values()), run).compute(name, 0) for name in names}
    ratio = written["base/no_decay"][0] / 1e-3
    assert written["base/muon"] == (pytest.approx(0.02 * ratio), 0.1)
    assert written["slow/muon"] == (pytest.approx(0.01 * ratio), 0.1)
    assert written["slow/decay"] == (pytest.approx(0.0005 * ratio), 0.1)
    same = dataclasses.replace(run, muon=dataclasses.replace(run.muon, learning_rate=None))
    assert GroupRates(list(groups.values()), same).compute("base/muon", 0)[0] == pytest.approx(1e-3 * ratio)


@pytest.mark.parametrize("flag", ["--muon.heads each", "--muon.momentum 0.9", "--muon.learning_rate 1e-3"])
def test_its_settings_are_refused_under_adamw(flag):
    with pytest.raises(UserError, match=r"^muon: given with optimizer.kind: adamw.*--optimizer.kind muon$"):
        parsed(flag)


def test_an_optimizer_of_deepspeed_is_refused():
    config = read_ds_config("ds_configs/zero2_offload.json")
    check_against_run(config | {"zero_force_ds_cpu_optimizer": False}, parsed(MUON))
    with pytest.raises(UserError, match=r"zero_force_ds_cpu_optimizer is True.*optimizer.kind muon makes it"):
        check_against_run(config | {"zero_force_ds_cpu_optimizer": True}, parsed(MUON))


def test_memory():
    """One moment of the matrices in place of two; in the step what is exchanged."""
    model = parsed().build_model_config()
    parameters = rank_parameters(model)
    matrices = sum(p.elements for p in parameters if p.name.startswith("layers.") and "norm" not in p.name)
    settings = [EngineSettings(stage=2, muon=muon) for muon in (False, True)]
    adamw, muon = (states(parameters, each, 2) for each in settings)
    assert adamw.moments - muon.moments == 4 * (matrices // 2) and adamw.master == muon.master
    plans = [memory_plan(model, each, 2, 1) for each in settings]
    assert plans[1].phases["step"] > plans[0].phases["step"] - 4 * (matrices // 2) + 8 * (matrices // 2)
    assert plans[0].states.device > plans[1].states.device


def resaved(run, shape, folder):
    """Load a finished run in this shape and save it again under *folder*; the notes."""
    opened = build(run, shape)
    engine = fit(opened)
    store = CheckpointStore(folder, run.checkpoint, opened.world)
    store.begin(engine, opened.state, run.folder / "tokenizer")
    store.finish()
    return opened.notes


def in_shape(run, shape, **changes):
    return dataclasses.replace(
        run, tensor_parallel=shape.tensor_parallel, precision=shape.precision, **changes
    )


def trained(data, runs, shape, *flags):
    run = shape_run(data, runs, shape, MUON, *flags)
    assert run_distributed(session_in, shape.ranks, run, shape, timeout=300)[0] is None
    return run


def session_in(run, shape):
    fit(build(run, shape))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "stage", "flags"),
    [(2, 2, RULE), (2, 3, "--precision bf16")],
)
def test_a_killed_run_continues_to_the_bit(small_folder, tmp_path, ranks, stage, flags):
    run = nano_run(small_folder, tmp_path, MUON, *filter(None, [flags]), "--diagnostics_every 4")
    broken = broken_off(run, 6, ranks=ranks, stage=stage)
    assert differences(contents(newest(run.folder)), contents(newest(broken.folder))) == []
    last = curve(run.folder)[-1]
    assert last["diagnostics/effective_lr/base/muon"] > 0 and last["lr/base/muon"] > 0
    assert (
        not flags.startswith("--lr_rules") or last["lr/slow/muon"] > 0 == curve(run.folder)[2]["lr/slow/muon"]
    )


@pytest.mark.slow
def test_a_run_that_grows_heads_continues_to_the_bit(small_folder, tmp_path):
    """New heads begin without momentum; all other heads keep theirs."""
    schedule = "--growth.head_dim 12 --growth.maximum 4 --growth.criterion schedule --checkpoint.every 0"
    flags = [schedule, "--growth.schedule", json.dumps({4: "1,2,1,3"})]
    run = nano_run(small_folder, tmp_path, MUON, *flags)
    broken_off(run, 4, 7, ranks=2)
    grown = contents(newest(run.folder))["layers.3.attention.q.weight"]
    assert grown["exp_avg"].shape[0] == 36 and all(head.any() for head in grown["exp_avg"].split(12))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Shape(4, 3, tensor_parallel=2), Shape(2, 1, "bf16")),
        (Shape(2, 3, zero=OFFLOAD), Shape(2, 2, tensor_parallel=2)),
    ],
    ids=str,
)
def test_a_change_of_shape_keeps_every_bit(small_folder, tmp_path, first, second):
    run = trained(small_folder, tmp_path, first, f"{ODD} --global_batch_tokens 768 --micro_batch 1")
    again = in_shape(run, second)
    notes = run_distributed(resaved, second.ranks, again, second, tmp_path / "again", timeout=300)[0]
    assert any(note.startswith("resharded") for note in notes)
    before = contents(newest(run.folder))
    assert differences(before, contents(newest(tmp_path / "again"))) == []
    name = "layers.0.ffn.up.weight"
    assert (
        before[name]["exp_avg"].any() and not before[name]["exp_avg_sq"].any() and before[name]["step"] == 3
    )
    # Two more steps in either shape.
    shutil.copytree(run.folder, run.folder.with_name("kept"))
    losses = []
    for shape, name in ((first, "kept"), (second, run.name)):
        longer = in_shape(run, shape, steps=5, name=name)
        assert run_distributed(session_in, shape.ranks, longer, shape, timeout=300)[0] is None
        losses.append([row["train_loss"] for row in curve(longer.folder)[3:]])
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-3 if "bf16" in f"{first} {second}" else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("adamw", "muon"), ("muon", "adamw")])
def test_another_optimizer_begins_anew_when_asked(small_folder, tmp_path, before, after):
    shape = Shape(2, 2)
    run = shape_run(small_folder, tmp_path, shape, "--optimizer.kind", before)
    assert run_distributed(session, 2, run, timeout=300)[0] == ([], None)
    kind = dataclasses.replace(run.optimizer, kind=after)
    other = dataclasses.replace(run, optimizer=kind)
    line = run_distributed(session, 2, other, timeout=300)[0][1]
    assert (
        line.startswith(f"optimizer.kind: {run.folder} was trained with {before}")
        and "--optimizer.reset true" in line
    )
    anew = dataclasses.replace(run, optimizer=dataclasses.replace(kind, reset=True))
    notes = run_distributed(resaved, 2, anew, shape, tmp_path / "again", timeout=300)[0]
    assert "the optimizer state is reset, the weights are kept" in notes
    old, new = contents(newest(run.folder)), contents(newest(tmp_path / "again"))
    for name, tensors in new.items():
        assert tensors["fp32"].equal(old[name]["fp32"]) and tensors["step"] == 0
        assert not tensors["exp_avg"].any() and not tensors["exp_avg_sq"].any()
    # It trains on, and is resumed as it is from then on.
    longer = dataclasses.replace(anew, steps=5)
    assert run_distributed(session, 2, longer, timeout=300)[0][1] is None
    assert contents(newest(run.folder))["final_norm.weight"]["step"] == 2
    notes, error = run_distributed(session, 2, dataclasses.replace(anew, steps=6), timeout=300)[0]
    assert error is None and not any("is reset" in note for note in notes)


WORLDS = [Shape(2, 2), Shape(2, 3, tensor_parallel=2), Shape(4, 1, tensor_parallel=4)]


@pytest.mark.slow
def test_30_steps_in_other_worlds_differ_by_rounding(small_folder, tmp_path):
    """Losses by at most 3e-6 (measured: 1e-6, two units in the last place); the weights of the blocks by at
    most 1e-5 at a rate of 0.03 (measured: 2.0e-6) and by less at a tenth of it (1.0e-7): what Muon makes of
    the rounding of gradients moves them by the rate."""
    apart = {}
    for rate in ("3e-2", "3e-3"):
        losses, weights = [], []
        for shape in [Shape(1, 1), *WORLDS]:
            flags = f"--steps 30 --optimizer.learning_rate {rate} --tensor_parallel {shape.tensor_parallel}"
            quiet = f"--validation.every 0 --checkpoint.every 0 --logging.every 1 --name {shape}-{rate}"
            run = nano_run(small_folder, tmp_path, MUON, flags, ODD, quiet)
            assert run_distributed(session_in, shape.ranks, run, shape, timeout=300)[0] is None
            losses.append([row["train_loss"] for row in curve(run.folder)])
            held = contents(newest(run.folder))
            weights.append(torch.cat([held[name]["fp32"].flatten() for name in held if "layers" in name]))
        assert losses[0][-1] < losses[0][0] - 0.5
        for other in losses[1:]:
            assert other == pytest.approx(losses[0], abs=3e-6)
        apart[rate] = max(((other - weights[0]).norm() / weights[0].norm()).item() for other in weights[1:])
    assert 3 * apart["3e-3"] < apart["3e-2"] < 1e-5
