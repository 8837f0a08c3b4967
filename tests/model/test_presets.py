import pytest
import torch

from model.errors import UserError
from model.presets import preset, preset_names
from model.transformer import Transformer

ROWS, PADDED_ROWS = 50_257, 50_304


def hand_count(rows, d, ffn, layers):
    # llama block: q, k, v, o; gate, up, down; two norm weights. Then the tied embedding and the final norm.
    return rows * d + layers * (4 * d * d + 3 * d * ffn + 2 * d) + d


def test_parameter_counts_by_hand():
    # 124M: 50,257*768 = 38,597,376; a layer 4*768^2 + 3*768*2048 + 2*768
    #     = 2,359,296 + 4,718,592 + 1,536 = 7,079,424; twelve of them 84,953,088; final norm 768.
    assert 38_597_376 + 12 * 7_079_424 + 768 == 123_551_232 == hand_count(ROWS, 768, 2048, 12)
    assert hand_count(PADDED_ROWS, 768, 2048, 12) == 123_551_232 + 47 * 768 == 123_587_328
    # 354M: 50,257*1024 = 51,463,168; a layer 4,194,304 + 8,404,992 + 2,048 = 12,601,344 (24 of them); 1,024.
    assert 51_463_168 + 24 * 12_601_344 + 1_024 == 353_896_448 == hand_count(ROWS, 1024, 2736, 24)
    assert hand_count(PADDED_ROWS, 1024, 2736, 24) == 353_896_448 + 47 * 1024 == 353_944_576
    # 757M: 50,257*1536 = 77,194,752; a layer 9,437,184 + 18,874,368 + 3,072 = 28,314,624 (24 of them); 1,536.
    assert 77_194_752 + 24 * 28_314_624 + 1_536 == 756_747_264 == hand_count(ROWS, 1536, 4096, 24)
    assert hand_count(PADDED_ROWS, 1536, 4096, 24) == 756_747_264 + 47 * 1536 == 756_819_456
    expected = {"124m": (123_551_232, 123_587_328), "354m": (353_896_448, 353_944_576)}
    expected["757m"] = (756_747_264, 756_819_456)
    for size, (plain, padded) in expected.items():
        for kind in ("uniform", "prism"):
            config = preset(f"{kind}-{size}")
            assert (config.num_parameters(), config.num_parameters(padded=True)) == (plain, padded)
    # As the paper prints them: 123.6M, 353.9M, 756.8M (the last one with padded rows).
    assert [f"{expected[size][1] / 1e6:.1f}M" for size in expected] == ["123.6M", "353.9M", "756.8M"]


def test_flops_by_hand_and_equal_for_every_schedule_of_a_scale():
    by_hand = {
        "124m": 6 * (12 * (2_359_296 + 4_718_592) + 38_597_376) + 12 * 12 * 1024 * 768,
        "354m": 6 * (24 * (4_194_304 + 8_404_992) + 51_463_168) + 12 * 24 * 1024 * 1024,
        "757m": 6 * (24 * (9_437_184 + 18_874_368) + 77_194_752) + 12 * 24 * 1024 * 1536,
    }
    sizes = dict.fromkeys(by_hand, 0)
    for name in preset_names():
        size = name.rsplit("-", 1)[-1]
        if size in by_hand:
            sizes[size] += 1
            assert preset(name).flops_per_token() == by_hand[size], name
            assert preset(name).num_parameters() == preset(f"uniform-{size}").num_parameters(), name
    assert sizes == {"124m": 2 + 7 + 3, "354m": 2 + 2, "757m": 2 + 2}


def test_schedules_of_the_papers():
    assert preset("prism-354m").heads == (4,) * 3 + (8,) * 3 + (16,) * 18
    assert preset("config-5-124m").heads == (2, 4, 6, 8) + (12,) * 8
    for name in (
        "prism-124m",
        *(f"config-{number}-124m" for number in range(1, 8)),
    ):  # the guideline h_1 <= ... <= h_L = h_base
        assert list(preset(name).heads) == sorted(preset(name).heads) and preset(name).heads[-1] == 12
    # head dims as the paper's table has them
    config = preset("prism-757m")
    assert {config.layer_head_dim(layer) for layer in range(24)} == {256, 128, 96}
    for size in ("124m", "354m", "757m"):
        for order in ("descending", "shuffled"):
            assert sorted(preset(f"{order}-{size}").heads) == sorted(preset(f"prism-{size}").heads)
            assert preset(f"{order}-{size}").heads != preset(f"prism-{size}").heads
    # 106 heads in 12 layers: 8.83, and 9 does not divide 768.
    assert preset("uniform-8-124m").heads == (8,) * 12


def test_head_progression_rows():
    names = [name for name in preset_names() if name.startswith("headprog-")]
    assert len(names) == 18
    assert preset("headprog-ascending-180").heads == (12, 24, 48, 96)
    assert preset("headprog-descending-45").heads == (24, 12, 6, 3)
    assert preset("headprog-constant-90").heads == (24, 24, 24, 24)
    for name in names:
        # The note's 68.5M: 50,257*768 + 2,048*768 + 4 * (12*768^2 + 768 + 3,072 + 768 + 4*768) + 2*768
        assert preset(name).num_parameters() == 38_597_376 + 1_572_864 + 4 * 7_085_568 + 1_536 == 68_514_048
        assert preset(name).local_window == (None, 256, None, 256)
        scaled = name.endswith("-scaled")
        assert preset(name).attention_scale == ("sqrt_head_dim" if scaled else "none")
        if scaled:
            difference = preset(name).difference(preset(name.removesuffix("-scaled")))
            assert difference == ["attention_scale: sqrt_head_dim != none"]


@pytest.mark.parametrize(
    ("size", "parameters", "tolerance"),
    [("270m", 270e6, 0.005), ("700m", 701e6, 0.005), ("mini", 1.8e6, 0.011)],
)
def test_matched_blocks_differ_in_their_switches_and_hardly_in_size(size, parameters, tolerance):
    names = [name for name in preset_names() if name.startswith("matched-") and name.endswith(f"-{size}")]
    assert len(names) == 16 and len({preset(name) for name in names}) == 16
    assert preset(f"matched-layernorm-bias-mlp-learned-{size}") == preset(f"gpt2-{size}")
    assert preset(f"matched-rmsnorm-nobias-swiglu-rope-{size}") == preset(f"llama-{size}")
    assert {preset(name).flops_per_token() for name in names} == {preset(f"gpt2-{size}").flops_per_token()}
    for name in names:
        assert preset(name).num_parameters() == pytest.approx(parameters, rel=tolerance)


@pytest.mark.parametrize("name", preset_names())
def test_counts_agree_with_the_network_that_is_built(name):
    config = preset(name)
    with torch.device("meta"):
        model = Transformer(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.num_parameters(padded=True)


def test_unknown_preset_names_the_closest():
    with pytest.raises(UserError, match=r"model: no preset 'prism-124'; did you mean 'prism-124m'\?"):
        preset("prism-124")


@pytest.mark.parametrize(
    ("name", "billions", "heads", "widths"),
    [
        ("openelm-270m", 0.27, (12, 20), (768, 5120)),
        ("openelm-450m", 0.46, (12, 24), (768, 6144)),
        ("openelm-1.1b", 1.08, (16, 32), (1024, 8192)),
        ("openelm-3b", 3.04, (12, 24), (1536, 12288)),
    ],
)
def test_openelm_rises_as_published(name, billions, heads, widths):
    """The sizes of the released models, and the ends of their schedules."""
    config = preset(name)
    assert round(config.num_parameters() / 1e9, 2) == billions
    assert (config.heads[0], config.heads[-1]) == heads and list(config.heads) == sorted(config.heads)
    assert (config.ffn_widths[0], config.ffn_widths[-1]) == widths
    assert config.kv_heads == tuple(count // 4 for count in config.heads)


@pytest.mark.parametrize("size", ["200m", "500m", "1b", "2b"])
def test_a_waist_has_the_parameters_of_its_uniform_model(size):
    """Up to the rounding of widths and what the paper's budget does not count: weights that read coordinates
    before anything was written there, or write what is not read."""
    waist, uniform = preset(f"waist-{size}"), preset(f"uniform-{size}")
    missing = max(waist.block_widths) - waist.d_model
    uncounted = (3 + 4) * max(waist.block_widths) * missing
    counted = waist.num_parameters() - uncounted
    assert counted == pytest.approx(uniform.num_parameters(), rel=0.006)
    assert waist.heads == uniform.heads == (16,) * uniform.num_layers
    assert all(
        width % 16 == 0 and waist.layer_head_dim(i) == width // 16
        for i, width in enumerate(waist.block_widths)
    )
