"""Parameters and activations by arithmetic, against the model itself."""

from __future__ import annotations

import pytest
import torch

from model.blocks import block
from model.config import ModelConfig
from model.presets import preset
from model.transformer import Transformer
from pretrain.config.command_line import parse_command_line
from pretrain.engine.ds_config import EngineSettings
from pretrain.engine.ds_config_check import read_ds_config
from pretrain.plan.footprint import activations, rank_parameters

LLAMA = block("llama", vocab_size=500, context_length=64, d_model=64, heads=(2, 4), ffn_width=176)
GPT2 = block("gpt2", vocab_size=500, context_length=64, d_model=64, heads=(2, 4), ffn_width=256)
WINDOWED = block(
    "gptneo", vocab_size=500, context_length=64, d_model=64, heads=(2, 4), ffn_width=96, tie_embeddings=False
)
BIASED = {"norm_bias": True, "ffn_bias": True, "attention_bias": "all"}
GROUPED = LLAMA.replace(kv_heads=(1, 2), head_dim=(16, 32), **BIASED)
GATED = [LLAMA.replace(attention_gate=gate, ffn_width=[96, 0]) for gate in ("head", "element")]
POSITIONS = LLAMA.replace(rope_base=[100.0, None], rotary_share=[0.5, 1.0])
ABSENT = GPT2.replace(heads=[0, 4], ffn_width=[96, 0])
WIDTHS = [LLAMA.replace(block_width=[96, 40]), GPT2.replace(block_width=[32, 64])]
MODELS = [LLAMA, GPT2, WINDOWED.replace(local_window=(None, 16)), GROUPED, *GATED, ABSENT, POSITIONS, *WIDTHS]


@pytest.mark.parametrize("config", [*MODELS, preset("prism-124m"), preset("gpt2-270m")])
def test_parameters_are_the_models(config: ModelConfig):
    with torch.device("meta"):
        model = Transformer(config)
    found = {p.name: p.elements for p in rank_parameters(config)}
    assert list(found.items()) == [(name, p.numel()) for name, p in model.named_parameters()]
    assert sum(found.values()) == config.num_parameters(padded=True)


def test_decayed_parameters_are_the_optimizers():
    from pretrain.config.sections import OptimizerConfig
    from pretrain.optim.groups import parameter_groups

    for config in MODELS:
        with torch.device("meta"):
            groups = parameter_groups(Transformer(config), OptimizerConfig())
        decayed = {p.name for p in rank_parameters(config) if p.decayed}
        assert decayed == set(groups[0]["parameter_names"])


@pytest.mark.parametrize("t", [2, 4])
def test_tensor_ranks_share_all_but_replicated_parameters(t: int):
    whole = {p.name: p.elements for p in rank_parameters(GROUPED)}
    for part in rank_parameters(GROUPED, t):
        replicated = "norm" in part.name or part.name.endswith(("o.bias", "down.bias"))
        assert part.elements * (1 if replicated else t) == whole[part.name], part.name


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", MODELS)
def test_activations_are_what_autograd_keeps(config: ModelConfig, dtype: torch.dtype, checkpointing: bool):
    """Every storage that a forward pass saves for the backward pass, parameters apart."""
    model = Transformer(config, checkpoint_activations=checkpointing).to(dtype)
    tokens = torch.randint(0, config.vocab_size, (4, config.context_length))
    model(tokens, tokens)  # makes the rotary tables
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept.setdefault(storage.data_ptr(), tensor)  # held, so that no other gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, tokens)
    saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    settings = EngineSettings(bf16=dtype == torch.bfloat16, checkpointing=checkpointing)
    predicted = activations(config, 4, settings, device="cpu").total
    # Not all ids and labels are saved, and checkpointing hides its layers' tables: a few bytes of thousands a
    # token.
    assert predicted == pytest.approx(saved, rel=0.05 if checkpointing else 0.02)


def kept(config, layer, micro_batch, t=1, device="cuda", **settings):
    """Bytes that autograd keeps of a layer."""
    return activations(config, micro_batch, EngineSettings(**settings), t, device).per_layer[layer]


def test_layer_of_757m_by_hand():
    config = preset("prism-757m")  # d 1536, W 4096, T 1024; layer 0 has 6 heads
    norms = 2 * (2 * 2 * 1536 + 4)  # input and output in bf16, one fp32 statistic
    attention = 2 * 4 * 1536 + 4 * 6  # q, k, v, output; log-sum-exp of each head
    gated = 2 * 4 * 4096
    assert kept(config, 0, 1) == 1024 * (norms + attention + gated) == 58_753_024
    # t = 4: 6 heads in 2 groups of 2 ranks, whose output is kept before and after its way back
    shared = 2 * 5 * 1536 // 4 + 6 + gated // 4
    assert kept(config, 0, 2, 4) == 2 * 1024 * (norms + shared)
    # with sequence parallelism a quarter of the norms, and their gathered outputs
    parts = 2 * (2 * 2 * 1536 + 4) // 4 + 2 * 2 * 1536 * 3 // 4
    assert kept(config, 0, 2, 4, sequence_parallel=True) == 2 * 1024 * (parts + shared)


def test_keys_and_values_are_repeated_where_flash_does_not_run_on_a_gpu():
    """Heads 2 and 4 of 16 and 32, with 1 and 2 of keys and values: 32 and 128 columns of queries, 16 and 64
    of keys."""
    B, T = 3, GROUPED.context_length

    def kept_by_layer(model, element, device, **options):
        return [kept(model, i, B, 1, device, bf16=element == 2, **options) for i in (0, 1)]

    def added(element, device, **options):
        """Bytes that a window adds to each layer, or a document mask."""
        model = GROUPED if options else GROUPED.replace(local_window=(16, 16))
        before, after = (
            kept_by_layer(GROUPED, element, device),
            kept_by_layer(model, element, device, **options),
        )
        return [one - other for one, other in zip(after, before, strict=True)]

    repeated = [2 * (32 - 16) * B * T * 2, 2 * (128 - 64) * B * T * 2]
    assert added(2, "cpu") == [T * T * 2] * 2 and added(2, "cpu", document_mask=True) == [0, 0]
    assert added(2, "cuda") == [T * T * 2 + each for each in repeated]
    whole = GROUPED.replace(kv_heads=GROUPED.heads)
    assert kept_by_layer(whole, 2, "cuda") == [
        sum(pair) for pair in zip(kept_by_layer(GROUPED, 2, "cuda"), repeated, strict=True)
    ]
    # Flash takes no fp32, so there they are repeated anyhow.
    assert kept_by_layer(whole, 4, "cuda") == kept_by_layer(GROUPED, 4, "cuda")
    assert added(4, "cuda", document_mask=True) == [0, 0]


def test_a_document_mask_by_hand():
    """Masks of three sequences for the one window, unless the kernel takes offsets; positions; two tables."""
    settings, T = EngineSettings(document_mask=True), 64
    own = T * (8 + 4 * (32 + 16))
    assert activations(LLAMA, 3, settings, device="cpu").documents == 3 * (own + T * T * 2)
    assert activations(LLAMA, 3, settings, device="cuda").documents == 3 * own
    windows = LLAMA.replace(local_window=(16, None))
    assert activations(windows, 3, settings, device="cpu").documents == 3 * (own + 2 * T * T * 2)


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"])
def test_settings_of_shipped_ds_configs(name: str):
    run = parse_command_line(["--activation_checkpointing", "true"]).run
    model = preset("prism-124m")
    settings = EngineSettings.from_run(run, read_ds_config(f"ds_configs/{name}.json"), True, model)
    assert settings.stage == int(name[4])
    assert settings.offload_optimizer == ("offload" in name)
    assert settings.offload_parameters == (name == "zero3_offload")
    assert (settings.accumulation_bytes, settings.communication_bytes) == (4, 4)
    assert settings.checkpointing
    assert settings.whole_gradients == (name == "zero1")


def test_settings_default_to_deepspeeds():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    run = parse_command_line([]).run
    for stage in (1, 2, 3):
        theirs = DeepSpeedZeroConfig(stage=stage)
        ours = EngineSettings.from_run(
            run, {"zero_optimization": {"stage": stage}}, False, preset("prism-124m")
        )
        assert ours.reduce_bucket == theirs.reduce_bucket_size
        assert ours.overlap == theirs.overlap_comm
        assert ours.all_reduce_buckets == theirs.use_multi_rank_bucket_allreduce
        assert ours.prefetch_bucket == theirs.prefetch_bucket_size
        assert ours.reuse_distance == theirs.max_reuse_distance
        assert ours.persistence_threshold == theirs.param_persistence_threshold
        assert (ours.accumulation_bytes, ours.communication_bytes) == (4, 4)
