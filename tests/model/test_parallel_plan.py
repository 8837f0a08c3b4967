"""The plan's arithmetic against the design's formulas, its refusals, and what it prints and draws."""

import json

import pytest

from model.config import block
from model.errors import UserError
from model.parallel_plan import (
    check_split,
    check_tensor_parallel,
    exchange_elements,
    head_groups,
    plan,
    split_multiple,
)
from model.parallel_plan.__main__ import main
from model.presets import preset
from model.tables import plan_table


def test_groups():
    assert [head_groups(3, t) for t in (1, 2, 3, 4, 6)] == [(1, 1), (1, 2), (3, 1), (1, 4), (3, 2)]
    assert [head_groups(8, t) for t in (2, 4, 8, 16)] == [(2, 1), (4, 1), (8, 1), (8, 2)]
    assert head_groups(6, 4) == (2, 2)


def test_elements_of_both_forms():
    # The design's formulas for one pass, B T = 64 tokens, A/t = 10: 4 B T (A/t) (r-1)/r and
    # B T (A/t) [2 (r-1)/r + 2 (r-1)].
    for ranks in (2, 4):
        assert exchange_elements("batch", ranks, 64, 10, 10) == 4 * 64 * 10 * (ranks - 1) // ranks
        assert (
            exchange_elements("query", ranks, 64, 10, 10) == 64 * 10 * 2 * (ranks - 1) * (1 + ranks) // ranks
        )
    assert exchange_elements("none", 1, 64, 10, 10) == 0


def test_plan_of_a_published_model():
    found = plan(preset("prism-124m"), 4, 8)
    assert [layer.ranks for layer in found.layers] == [4, 4, 2, 2] + [1] * 8
    assert {layer.form for layer in found.layers} == {"batch", "none"}
    tokens, bf16 = 8 * 1024, 2
    # Forward and backward: 4 B T (A/t) (r-1)/r elements each way.
    assert found.layers[0].exchange_bytes == 2 * 4 * tokens * 192 * 3 // 4 * bf16
    assert found.layers[2].exchange_bytes == 2 * 4 * tokens * 192 // 2 * bf16
    # Four all-reduces of B T d a layer, two outside the layers, and three fp32 numbers per token for the loss.
    ring = 2 * 3 / 4
    assert found.layers[5].all_reduce_bytes == 4 * ring * tokens * 768 * bf16
    assert found.all_reduce_bytes == ring * tokens * ((4 * 12 + 2) * 768 * bf16 + 3 * 4)
    alone = plan(preset("prism-124m"), 1, 8)
    assert alone.exchange_bytes == 0 and alone.all_reduce_bytes == 0


@pytest.mark.parametrize(
    ("changes", "tensor_parallel", "message"),
    [
        ({}, 5, "tensor_parallel: 5 does not divide ffn_width 48; nearest valid: 4 or 6"),
        ({"ffn_width": 49}, 2, "tensor_parallel: 2 does not divide ffn_width 49; nearest valid: 1"),
        (
            {"head_dim": (2, 6)},
            4,
            "tensor_parallel: 4 does not divide attention width (layer 0) 6; nearest valid: 3 or 6",
        ),
        (
            {"kv_heads": (1, 2)},
            3,
            "tensor_parallel: 3 does not divide key/value width (layer 0) 8; nearest valid: 2 or 4",
        ),
        ({}, 0, "tensor_parallel: 0 is not valid; give a positive integer"),
    ],
)
def test_widths_that_do_not_divide_are_refused(changes, tensor_parallel, message):
    config = block("llama", vocab_size=9, context_length=8, d_model=24, ffn_width=48, heads=(3, 4))
    with pytest.raises(UserError) as caught:
        check_tensor_parallel(config.replace(**changes), tensor_parallel)
    assert str(caught.value) == message


def test_sequence_parallelism_needs_positions_that_divide():
    config = block("llama", vocab_size=9, context_length=6, d_model=24, ffn_width=48, heads=(3, 4))
    check_tensor_parallel(config, 4)
    with pytest.raises(UserError, match=r"context_length \(sequence_parallel\) 6; nearest valid: 3 or 6"):
        check_tensor_parallel(config, 4, sequence_parallel=True)


def test_micro_batches_that_cannot_be_split_are_refused():
    config = block("llama", vocab_size=9, context_length=9, d_model=96, ffn_width=48, heads=(1, 3, 2))
    assert split_multiple(config, 6) == 6 and split_multiple(config.replace(context_length=24), 6) == 1
    check_split(config, 6, 6)
    with pytest.raises(UserError) as caught:
        check_split(config, 6, 8)
    assert str(caught.value) == (
        "micro_batch: 8 sequences of 9 tokens cannot be shared by the 6 ranks that split the heads of layer 0; "
        "micro_batch must be a multiple of 6 (nearest: 6 or 12), or context_length one of 12"
    )


def test_it_is_printed_and_drawn(tmp_path, capsys):
    picture = tmp_path / "plan.png"
    arguments = ["--model", "prism-124m", "--tensor_parallel", "4", "--plot", str(picture)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert plan_table(plan(preset("prism-124m"), 4, 8)) in printed
    assert "60.00, 6.7 % on top" in printed and picture.stat().st_size > 10_000
    assert main([*arguments[:4], "--accumulation", "2", "--micro_batch", "3"]) == 0
    assert "step of 2 x 3 sequences" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "prism-124", "--tensor_parallel", "4"], "did you mean 'prism-124m'"),
        (["--model", "prism-124m", "--tensor_parallel", "5"], "nearest valid: 4 or 8"),
        (["--model", "prism-124m", "--tensor_parallel", "4", "--micro_batch", "0"], "micro_batch: 0"),
        (
            ["--model", "prism-124m", "--tensor_parallel", "4", "--plot", "/dev/null/x.png"],
            "--plot: cannot write",
        ),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_model_of_ones_own_is_read_from_a_file(tmp_path, capsys):
    file = tmp_path / "model.json"
    file.write_text(json.dumps(preset("prism-nano").replace(heads="1,2,4,4").to_json()))
    assert main(["--model", str(file), "--tensor_parallel", "2"]) == 0
    own = capsys.readouterr().out
    assert main(["--model", "prism-nano", "--heads", "1,2,4,4", "--tensor_parallel", "2"]) == 0
    assert capsys.readouterr().out == own
    for text, said in (
        ("[[", "is not valid JSON"),
        ("5", "error: model"),
        ("[" * 100_000, "is not valid JSON"),
    ):
        file.write_text(text)
        assert main(["--model", str(file), "--tensor_parallel", "2"]) == 2
        assert said in capsys.readouterr().err
    assert main(["--model", str(tmp_path / "none.json"), "--tensor_parallel", "2"]) == 2
    assert "cannot read" in capsys.readouterr().err
