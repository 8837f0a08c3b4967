"""Settings that must not change the training's numbers: the curve of a run with each, compared with the plain
run's.

Exact where the same operations are done in the same order; within rounding where sums are taken in another
order.
"""

from __future__ import annotations

import json

import pytest

from pretrain.prepare.assemble import Selection
from pretrain.prepare.make import make_corpus
from pretrain.prepare.sources.plain_files import PlainFiles
from tests.helpers.distributed import run_distributed
from tests.helpers.small_corpus import small_paths
from tests.helpers.training import curve, nano_run, session

STEPS = 6
ROUNDING = 3e-7  # losses are sums in fp32, whose last place is 7e-8 of them
OVER_RANKS = 1e-6  # the design's bound in fp32
LENGTHS = "--schedule.kind wsd --schedule.warmup 2"
BASES = {
    "adamw": "--optimizer.kind adamw",
    "muon": "--optimizer.kind muon --muon.heads each --architecture.qk_norm weighted "
    "--architecture.z_loss 0.01 --architecture.attention_bias all",
}
ONE_HEAD_DIM = "--architecture.heads 4x4 --architecture.head_dim 12x4"
GROWTH = "--growth.criterion schedule --growth.start 4 --growth.head_dim 12"
RULE = "[{name: same, parameters: [q, k], layers: upper_half, scale: 1, hold: 3}]"

# Name -> flags of the plain run; of the other its flags, largest relative difference, ranks and stage.
RELATIONS = {
    "repeat": ("", "", 0, 1, 2),
    "activation checkpointing": ("", "--activation_checkpointing true", 0, 1, 2),
    "stage 1": ("", "", 0, 1, 1),
    "blend of one": ("", "--data CORPUS:1.0", 0, 1, 2),
    "its own validation data": ("", "--validation.data CORPUS", 0, 1, 2),
    "a window of all": ("", "--architecture.local_window [64,null,99,64]", 0, 1, 2),
    "a kv head for each": ("", "--architecture.kv_heads 2,3,4,4", 0, 1, 2),
    "head_dim d/h": ("", "--architecture.head_dim 24,16,12,12", 0, 1, 2),
    "written beside": ("", "--checkpoint.background true", 0, 1, 2),
    "document mask on one document": ("--data ONE", "--data ONE --document_mask true", 0, 1, 2),
    "mup at m = 1": (
        "--architecture.attention_scale head_dim --architecture.attention_scale_base 16",
        "--architecture.parametrization mup --architecture.base_width 48 "
        "--architecture.attention_scale head_dim --architecture.attention_scale_base 16",
        0,
        1,
        2,
    ),
    "growth without growth": (
        ONE_HEAD_DIM,
        f"{GROWTH} --growth.maximum 4 --growth.schedule '{{3: 4x4}}'",
        0,
        1,
        2,
    ),
    "micro-batch": ("", "--micro_batch 8", ROUNDING, 1, 2),
    "fused none": ("", "--fused none", ROUNDING, 1, 2),
    "fused all": ("", "--fused all", ROUNDING, 1, 2),
    "blocks": ("", "--attention blocks", ROUNDING, 1, 2),
    "stage 3": ("", "", ROUNDING, 1, 3),
    "cap of a million": ("", "--architecture.logit_softcap 1e6", ROUNDING, 1, 2),
    "rule of scale 1": ("", f"--lr_rules '{RULE}'", ROUNDING, 1, 2),
    "two ranks": ("", "", OVER_RANKS, 2, 2),
    "t = 2": ("", "--tensor_parallel 2 --sequence_parallel true", OVER_RANKS, 2, 2),
}


@pytest.fixture(scope="module")
def plain(small, small_folder, tmp_path_factory):
    """Two functions: one trains a run, the other trains a plain run once for all relations that have it.

    ONE is a corpus of one document.
    """
    root = tmp_path_factory.mktemp("relations")
    paths = [root / f"{split}.txt" for split in ("training", "validation")]
    text = "".join(path.read_text() for path in small_paths()[:12])
    for path, part in zip(paths, (text[3000:], text[:3000]), strict=True):
        path.write_text(part)
    files = [(path.name, path) for path in paths]
    one = make_corpus(PlainFiles("one", files), root / "one", small.tokenizer, Selection(0.5))
    curves = {}

    def train(name, base, flags, ranks=1, stage=2, steps=STEPS):
        given = f"{BASES[base]} {LENGTHS} --steps {steps} --validation.every 3 --checkpoint.every 3 {flags}"
        given = given.replace("CORPUS", str(small_folder)).replace("ONE", str(one))
        run = nano_run(small_folder, root, given, "--name", name.replace(" ", "_").replace("/", "_"))
        for said in run_distributed(session, ranks, run, stage, timeout=200):
            assert said[1] is None, said
        return curve(run.folder)

    def once(base, flags):
        if (base, flags) not in curves:
            curves[base, flags] = train(f"plain {base} {len(curves)}", base, flags)
        return curves[base, flags]

    return train, once


def values(rows):
    """What was measured of each step: not the rates, whose names are those of groups."""
    kept = ("train_loss", "val_loss", "grad_norm")
    return [[row[key] for key in kept if key in row] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", RELATIONS)
def test_a_setting_that_changes_nothing(name, base, plain):
    train, once = plain
    flags, changed, tolerance, ranks, stage = RELATIONS[name]
    expected, found = values(once(base, flags)), values(train(f"{base} {name}", base, changed, ranks, stage))
    print(json.dumps([expected, found]))
    assert len(found) == STEPS
    if tolerance == 0:
        assert found == expected
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_a_run_that_is_made_longer(base, plain):
    """Of a schedule without an end, so that the rate does not depend on the length."""
    train, once = plain
    constant = "--schedule.decay 0"
    train(f"{base} extended", base, constant, steps=STEPS - 2)
    found = train(f"{base} extended", base, constant)
    assert len(found) == STEPS
    # The shorter run was validated and saved at its last step, too.
    found[STEPS - 3].pop("val_loss", None), found[STEPS - 3].pop("val_bpb", None)
    assert values(found) == values(once(base, constant))
