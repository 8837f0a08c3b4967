"""Native folders with programs of others: what they compute is what the model computes. Slow."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from tests.helpers.networks import network, tokens

pytestmark = pytest.mark.slow
KINDS = ("prism", "gptneo_windows", "modern")
"""Heads per layer; windows and learned positions; qk norm, cap and muP."""


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


@pytest.mark.parametrize("name", KINDS)
def test_torch_export(name, folders):
    model, ids = load(folders(name)), tokens(2, 24)
    exported = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False).module()
    other = tokens(2, 24, seed=1)
    with torch.no_grad():
        found = exported(input_ids=other, use_cache=False).logits
        torch.testing.assert_close(found, network(name)(other), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_assisted_generation_writes_what_greedy_writes(name, folders):
    model, assistant, ids = load(folders(name)), load(folders("uniform")), tokens(1, 9)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    assert model.generate(ids, assistant_model=assistant, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("name", KINDS)
def test_static_cache_with_a_compiled_forward_pass(name, folders):
    model, ids = load(folders(name)), tokens(2, 9)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    model.forward = torch.compile(model.forward, backend="aot_eager")
    found = model.generate(ids, cache_implementation="static", **options)
    assert found.tolist() == expected.tolist()


def test_quantised_cache(folders):
    pytest.importorskip("optimum.quanto")
    model, ids = load(folders("uniform")), tokens(1, 9)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    quantised = model.generate(ids, cache_implementation="quantized", **options)
    assert quantised.shape == model.generate(ids, **options).shape


@pytest.mark.parametrize("name", KINDS)
def test_accelerate_offloads_layers_to_disk(name, folders, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, ids = load(folders(name)), tokens(2, 24)
    places = {f"model.layers.{layer}": "disk" for layer in range(1, len(model.model.layers))}
    named = {child: "cpu" for child, _ in model.model.named_children() if child != "layers"}
    places |= {f"model.{child}": place for child, place in named.items()}
    places |= {"model.layers.0": "cpu", "lm_head": "cpu"}
    spread = accelerate.dispatch_model(
        model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True
    )
    with torch.no_grad():
        found = spread(ids).logits
    torch.testing.assert_close(found, network(name)(ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_trainer_resumes(name, folders, tmp_path):
    """Four steps at once, and the last two again from the checkpoint of the second: the same weights."""
    data = [{"input_ids": row, "labels": row} for row in tokens(16, 24)]

    def train(resume=None):
        step = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "use_cpu": True}
        quiet = {"report_to": [], "save_strategy": "steps", "save_steps": 2, "disable_tqdm": True}
        model = load(folders(name)).train()
        arguments = TrainingArguments(str(tmp_path), **step, **quiet)
        Trainer(model=model, args=arguments, train_dataset=data).train(resume_from_checkpoint=resume)
        return dict(model.named_parameters())

    whole = train()
    again = train(str(tmp_path / "checkpoint-2"))
    for parameter, value in whole.items():
        torch.testing.assert_close(again[parameter], value, msg=parameter)
