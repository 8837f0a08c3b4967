"""The exported architecture computes what our network computes, and does what transformers' users expect.

1e-5 of the largest logit in fp32: the same products summed in another order differ by some 1e-7. In bf16 (8
bits) each of the layers rounds by 2^-9; 3e-2 leaves a factor of ten.
"""

import copy
import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cache,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    Trainer,
    TrainingArguments,
)
from transformers.cache_utils import QuantizedLayer

from model.sampling import make_cached_predictor, sample
from pretrain.hf.export_folder import CODE_FILES
from pretrain.hf.modeling_head_schedule import CACHE_NAME, HeadScheduleForCausalLM
from tests.helpers.marks import slow
from tests.helpers.networks import CONFIGS, network, relative, tokens

FP32, BF16 = 1e-5, 3e-2
# Different head counts, grouped queries, windows, learned positions, normed queries and a soft cap, a first
# layer without attention.
SOME = ["prism", "grouped", "gptneo_windows", "gpt2_prism", "modern", "absent"]
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 1}


def load(folder, attention="sdpa", **options):
    return HeadScheduleForCausalLM.from_pretrained(folder, attn_implementation=attention, **options).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_ours(name, attention, folders):
    ids = tokens(2, 64)
    theirs = load(folders(name), attention)
    with torch.no_grad():
        assert relative(theirs(ids).logits, network(name)(ids)) <= FP32


@pytest.mark.parametrize("name", ["prism", "gptneo_windows", "gpt2"])
def test_bf16_logits_are_close_to_fp32(name, folders):
    ids = tokens(2, 64)
    theirs = load(folders(name), dtype=torch.bfloat16)
    with torch.no_grad():
        assert relative(theirs(ids).logits, network(name)(ids)) <= BF16
        assert relative(theirs(ids).logits, network(name, torch.bfloat16)(ids)) <= BF16


def test_rotary_frequencies_survive_casts(folders):
    for name, kinds in (("prism", 3), ("positions", 3)):
        whole = load(folders(name)).model.rotary_emb
        for cast in (load(folders(name), dtype=torch.bfloat16), load(folders(name)).to(torch.bfloat16)):
            for index in range(kinds):
                got = getattr(cast.model.rotary_emb, f"frequencies_{index}")
                assert torch.equal(got, getattr(whole, f"frequencies_{index}"))


NAMES = list(CONFIGS)


@pytest.mark.parametrize("name", [*NAMES[::4], *slow(name for name in NAMES if name not in NAMES[::4])])
def test_greedy_generation_with_cache_without_and_ours_agree(name, folders):
    ids = tokens(1, 7, seed=3)
    theirs = load(folders(name))
    options = {**GREEDY, "max_new_tokens": 40}
    with_cache = theirs.generate(ids, **options)
    without = theirs.generate(ids, use_cache=False, **options)
    ours = list(
        sample(make_cached_predictor(network(name)), ids[0].tolist(), 40, temperature=0, top_p=1, seed=0)
    )
    assert with_cache[0, 7:].tolist() == without[0, 7:].tolist() == ours


@pytest.mark.parametrize(("name", "attention"), [*((name, "sdpa") for name in SOME), ("grouped", "eager")])
def test_left_padded_batches_equal_single_ones(name, attention, folders):
    theirs = load(folders(name), attention)
    long, short = tokens(1, 20, seed=4), tokens(1, 12, seed=5)
    padded = torch.cat([long, torch.cat([torch.ones(1, 8, dtype=torch.int64), short], 1)])
    mask = torch.ones_like(padded)
    mask[1, :8] = 0
    with torch.no_grad():
        batch = theirs(padded, attention_mask=mask).logits
        assert relative(batch[0], theirs(long).logits[0]) <= FP32
        assert relative(batch[1, 8:], theirs(short).logits[0]) <= FP32
    options = {**GREEDY, "max_new_tokens": 30}
    batch = theirs.generate(padded, attention_mask=mask, **options)
    assert batch[0, 20:].tolist() == theirs.generate(long, **options)[0, 20:].tolist()
    assert batch[1, 20:].tolist() == theirs.generate(short, **options)[0, 12:].tolist()


@pytest.mark.parametrize("name", ["prism", "gptneo", "gptneo_windows"])
def test_static_cache_generates_the_same(name, folders):
    theirs = load(folders(name))
    ids = tokens(1, 7, seed=3)
    options = {**GREEDY, "max_new_tokens": 20, "disable_compile": True}
    static = theirs.generate(ids, cache_implementation="static", **options)
    assert static.tolist() == theirs.generate(ids, **options).tolist()


class WholeGroups(QuantizedLayer):
    """A quantized cache's layer that takes what quanto takes, and keeps every digit."""

    def _quantize(self, tensor, axis):
        assert tensor.numel() % self.q_group_size == 0
        return tensor

    def _dequantize(self, tensor):
        return tensor


def test_layers_without_attention_in_a_quantized_cache(folders):
    theirs, ids = load(folders("absent")), tokens(1, 21)
    cache = Cache(layers=[WholeGroups(q_group_size=8, residual_length=4) for _ in range(4)])
    with torch.no_grad():
        parts = [theirs(part, past_key_values=cache).logits for part in ids.split((9, *[1] * 12), 1)]
        assert relative(torch.cat(parts, 1), network("absent")(ids)) <= FP32


@pytest.mark.parametrize("name", SOME)
def test_saved_and_loaded_is_bit_equal(name, folders, tmp_path):
    first = load(folders(name))
    first.save_pretrained(tmp_path / "again")
    second = load(tmp_path / "again")
    assert first.state_dict().keys() == second.state_dict().keys()
    assert all(torch.equal(tensor, second.state_dict()[key]) for key, tensor in first.state_dict().items())
    kept = [json.loads((path / "config.json").read_text()) for path in (folders(name), tmp_path / "again")]
    assert kept[0].pop("auto_map") and kept[1].pop("auto_map", True)
    assert kept[0] == kept[1]


def test_the_shipped_code_loads_by_itself(folders):
    """AutoModelForCausalLM runs the copies in the folder, which know nothing of this package."""
    theirs = AutoModelForCausalLM.from_pretrained(folders("prism"), trust_remote_code=True).eval()
    assert type(theirs).__module__.startswith("transformers_modules")
    ids = tokens(2, 64)
    with torch.no_grad():
        assert relative(theirs(ids).logits, network("prism")(ids)) <= FP32
    for file in CODE_FILES:
        code = (folders("prism") / file).read_text()
        assert "import pretrain" not in code and "from pretrain" not in code and "from model" not in code


def test_logits_to_keep(folders):
    theirs, ids = load(folders("prism")), tokens(2, 30)
    with torch.no_grad():
        whole = theirs(ids).logits
        assert relative(theirs(ids, logits_to_keep=3).logits, whole[:, -3:]) <= FP32
        picked = torch.tensor([0, 7, 29])
        assert relative(theirs(ids, logits_to_keep=picked).logits, whole[:, picked]) <= FP32


def test_hidden_states_and_attentions(folders):
    theirs = load(folders("prism"), "eager")
    output = theirs(tokens(1, 10), output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == 5 and output.hidden_states[0].shape == (1, 10, 48)
    assert [weights.shape[1] for weights in output.attentions] == [2, 3, 4, 4]


def test_cache_has_each_layers_shape(folders):
    output = load(folders("grouped"))(tokens(1, 10), use_cache=True)
    shapes = [tuple(layer.keys.shape) for layer in output[CACHE_NAME].layers]
    assert shapes == [(1, 2, 10, 12), (1, 4, 10, 12), (1, 2, 10, 6)]


@pytest.mark.parametrize("cache_name", sorted({"past_key_values", CACHE_NAME}))
@pytest.mark.parametrize("name", SOME)
def test_the_cache_has_both_names_of_transformers(name, cache_name, folders):
    theirs, ids = load(folders(name)), tokens(2, 30)
    with torch.no_grad():
        ours = network(name)(ids)
        cache = theirs(ids[:, :20], use_cache=True)[CACHE_NAME]
        assert relative(theirs(ids[:, 20:], **{cache_name: cache}).logits, ours[:, 20:]) <= FP32
        # the base model, which transformers' classifiers call
        whole = theirs.model(ids).last_hidden_state
        cache = theirs.model(ids[:, :20], use_cache=True)[CACHE_NAME]
        rest = theirs.model(ids[:, 20:], **{cache_name: cache}).last_hidden_state
        assert relative(rest, whole[:, 20:]) <= FP32


def test_a_cache_under_an_unknown_name_is_an_error(folders):
    theirs, ids = load(folders("prism")), tokens(1, 10)
    given = {"config": theirs.config, "inputs_embeds": theirs.model.embed_tokens(ids), "attention_mask": None}
    for call in (theirs, theirs.model):
        with pytest.raises(TypeError, match=f"^memory: this code .* pass one cache, as {CACHE_NAME}, or"):
            call(ids, memory=DynamicCache())
    with pytest.raises(TypeError, match=r"^memory: "):
        theirs.create_masks_for_generate(**given, memory=DynamicCache())
    with pytest.raises(TypeError):
        theirs(ids, past_key_values=DynamicCache(), cache=DynamicCache())


@pytest.mark.slow
def test_continuous_batching_generates_the_same(folders):
    theirs = load(folders("uniform"))
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (7, 12)]
    options = {
        "generation_config": GenerationConfig(**GREEDY, max_new_tokens=12),
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64),
    }
    batch = theirs.generate_batch(inputs=prompts, progress_bar=False, **options)
    for prompt, output in zip(prompts, batch.values(), strict=True):
        single = theirs.generate(torch.tensor([prompt]), **GREEDY, max_new_tokens=12)
        assert output.generated_tokens == single[0, len(prompt) :].tolist()


def test_gradient_checkpointing_changes_no_gradient(folders):
    plain, ids = load(folders("prism")).train(), tokens(2, 32)
    saving = copy.deepcopy(plain)
    saving.gradient_checkpointing_enable()
    for model in (plain, saving):
        model(ids, labels=ids).loss.backward()
    assert saving.is_gradient_checkpointing
    for (name, one), other in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


def test_loss_is_the_shifted_mean_cross_entropy(folders):
    ids = tokens(2, 32)
    loss = load(folders("prism"))(ids, labels=ids).loss
    ours = network("prism")(ids[:, :-1], ids[:, 1:].contiguous())
    assert loss.item() == pytest.approx(ours.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["grouped", "gpt2_prism"])
def test_trainer_takes_a_step(name, folders, tmp_path):
    model = load(folders(name)).train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    data = [{"input_ids": row, "labels": row} for row in tokens(4, 32)]
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True}
    step = {"max_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "use_cpu": True}
    arguments = TrainingArguments(str(tmp_path), gradient_checkpointing=True, **step, **quiet)
    Trainer(model=model, args=arguments, train_dataset=data).train()
    after = dict(model.named_parameters())
    unchanged = [name for name, tensor in before.items() if torch.equal(tensor, after[name])]
    assert unchanged == []
