"""The plan's arithmetic against the design's formulas, and its refusals."""

import pytest

from model.blocks import block
from model.context_plan import check_context_parallel
from model.errors import UserError
from model.parallel_plan import check_split, check_tensor_parallel, head_groups
from model.presets import preset
from pretrain.plan.tensor_parallel import exchange_elements, plan_tensor_parallel


def test_groups():
    assert [head_groups(3, t) for t in (1, 2, 3, 4, 6)] == [(1, 1), (1, 2), (3, 1), (1, 4), (3, 2)]
    assert [head_groups(8, t) for t in (2, 4, 8, 16)] == [(2, 1), (4, 1), (8, 1), (8, 2)]
    assert head_groups(6, 4) == (2, 2)


def test_elements_of_both_forms():
    # The design's formulas for one pass, B T = 64 tokens, A/t = 10: 4 B T (A/t) (r-1)/r and
    # B T (A/t) [2 (r-1)/r + 2 (r-1)].
    for ranks in (2, 4):
        assert exchange_elements("batch", ranks, 64, 10, 10) == 4 * 64 * 10 * (ranks - 1) // ranks
        sent = 64 * 10 * 2 * (ranks - 1) * (1 + ranks) // ranks
        assert exchange_elements("query", ranks, 64, 10, 10) == sent
    assert exchange_elements("none", 1, 64, 10, 10) == 0


def test_plan_of_a_published_model():
    found = plan_tensor_parallel(preset("prism-124m"), 4, 8)
    assert [layer.ranks for layer in found.layers] == [4, 4, 2, 2] + [1] * 8
    assert {layer.form for layer in found.layers} == {"batch", "none"}
    tokens, bf16 = 8 * 1024, 2
    # Forward and backward: 4 B T (A/t) (r-1)/r elements each way.
    assert found.layers[0].exchange_bytes == 2 * 4 * tokens * 192 * 3 // 4 * bf16
    assert found.layers[2].exchange_bytes == 2 * 4 * tokens * 192 // 2 * bf16
    # Four all-reduces of B T d a layer, two outside the layers, and three fp32 numbers per token for the
    # loss.
    ring = 2 * 3 / 4
    assert found.layers[5].all_reduce_bytes == 4 * ring * tokens * 768 * bf16
    assert found.all_reduce_bytes == ring * tokens * ((4 * 12 + 2) * 768 * bf16 + 3 * 4)
    alone = plan_tensor_parallel(preset("prism-124m"), 1, 8)
    assert alone.exchange_bytes == 0 and alone.all_reduce_bytes == 0


FOUR = {"heads": (3,) * 4}
REFUSED = [
    ({}, 5, "5 does not divide ffn_width 48; nearest valid: 4 or 6"),
    ({"ffn_width": 49}, 2, "2 does not divide ffn_width 49; nearest valid: 1; or a width of 48 or 50"),
    (
        {"ffn_width": "tapered(384)"} | FOUR,
        3,
        "3 does not divide ffn_width (layer 1) 448; nearest valid: 2 or 4; or a width of 447 or 450; an "
        "allocation by name takes multiple=48",
    ),
    (
        {"ffn_width": "tapered(100, multiple=20)"} | FOUR,
        3,
        "3 does not divide ffn_width (layer 0) 140; nearest valid: "
        "2 or 4; or a width of 138 or 141; an allocation by name takes multiple=3",
    ),
    # Other widths need another degree.
    (
        {"ffn_width": "tapered(384)"} | FOUR,
        5,
        "5 does not divide ffn_width (layer 0) 576; nearest valid: 4 or 8",
    ),
    ({"head_dim": (2, 6)}, 4, "4 does not divide attention width (layer 0) 6; nearest valid: 3 or 6"),
    ({"kv_heads": (1, 2)}, 3, "3 does not divide key/value width (layer 0) 8; nearest valid: 2 or 4"),
    ({}, 0, "0 is not valid; give a positive integer"),
]


@pytest.mark.parametrize(("changes", "tensor_parallel", "message"), REFUSED)
def test_widths_that_do_not_divide_are_refused(changes, tensor_parallel, message):
    config = block("llama", vocab_size=9, context_length=8, d_model=24, ffn_width=48, heads=(3, 4))
    with pytest.raises(UserError) as caught:
        check_tensor_parallel(config.replace(**changes), tensor_parallel)
    assert str(caught.value) == f"tensor_parallel: {message}"


def test_sequence_parallelism_needs_positions_that_divide():
    config = block("llama", vocab_size=9, context_length=6, d_model=24, ffn_width=48, heads=(3, 4))
    check_tensor_parallel(config, 4)
    with pytest.raises(UserError, match=r"context_length \(sequence_parallel\) 6; nearest valid: 3 or 6"):
        check_tensor_parallel(config, 4, sequence_parallel=True)


def test_context_ranks_of_sequence_parallel_ones():
    """A context of 24 is shared by 2, 4 and 12 ranks; with sequence parallelism of 4 by 2 and 6."""
    config = block("llama", vocab_size=9, context_length=24, d_model=24, ffn_width=48, heads=(4, 4))
    for sequence_parallel, nearest in ((False, "4 or 6"), (True, "3 or 6")):
        with pytest.raises(UserError, match=f"nearest valid context_parallel: {nearest}$"):
            check_context_parallel(config, 5, 4, sequence_parallel=sequence_parallel)


def test_the_degrees_that_are_named_share_the_ranks():
    config = block("llama", vocab_size=9, context_length=24, d_model=24, ffn_width=48, heads=(4, 4))
    with pytest.raises(UserError, match=r"nearest valid: 4 or 8$"):
        check_tensor_parallel(config, 5, world_size=40)
    with pytest.raises(UserError, match=r"nearest valid context_parallel: 4$"):
        check_context_parallel(config, 5, 4, world_size=16)


def test_micro_batches_that_cannot_be_split_are_refused():
    config = block("llama", vocab_size=9, context_length=9, d_model=96, ffn_width=48, heads=(1, 3, 2))
    check_split(config, 6, 6)
    with pytest.raises(UserError) as caught:
        check_split(config, 6, 8)
    assert str(caught.value) == (
        "micro_batch: 8 sequences of 9 tokens cannot be shared by the 6 ranks that split the heads of "
        "layer 0; micro_batch must be a multiple of 6 (nearest: 6 or 12), or context_length one of 12"
    )
    config = block("llama", vocab_size=9, context_length=9, d_model=96, ffn_width=48, heads=(3, 2))
    with pytest.raises(
        UserError, match=r"the 2 ranks .* layer 0; .* a multiple of 6 .* context_length one of 12"
    ):
        check_split(config, 6, 7)  # layer 1 needs a multiple of 6
