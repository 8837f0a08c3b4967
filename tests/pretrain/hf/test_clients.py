"""Native folders with programs of others: what they compute is what the model computes. Slow.

Packages that are not pinned are tested where they are installed: TRL, torchao, optimum-quanto, onnxruntime
and onnxscript.
"""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from tests.helpers.corpora import byte_level
from tests.helpers.exports import write_folder
from tests.helpers.networks import network, relative, tokens

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


def quantized_cache_logits(model, ids):
    """Logits of eight greedy steps whose cache holds all but the newest few positions in four bits."""
    cache = {"backend": "quanto", "nbits": 4, "q_group_size": 4, "residual_length": 4}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    written = model.generate(
        ids,
        cache_implementation="quantized",
        cache_config=cache,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return written.sequences, torch.stack(written.logits)


def test_quantized_cache(folders, tmp_path):
    """Equal to that of a Llama with the same weights; with other heads in each layer, or no heads, near the
    logits that no cache gives."""
    pytest.importorskip("optimum.quanto")
    ids = tokens(1, 9)
    llama = write_folder(network("uniform"), tmp_path / "llama", "llama")
    expected = quantized_cache_logits(LlamaForCausalLM.from_pretrained(llama).eval(), ids)
    found = quantized_cache_logits(load(folders("uniform")), ids)
    assert found[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-5)
    for name in ("prism", "absent"):
        sequence, logits = quantized_cache_logits(load(folders(name)), ids)
        with torch.no_grad():
            exact = network(name)(sequence)[0, 8:-1]
        assert 1e-5 < relative(logits[:, 0], exact) < 0.2


@pytest.mark.parametrize("name", KINDS)
def test_weights_in_int8(name, folders):
    """torchao's are those that rounding by hand gives: one scale for each row of the blocks' weights."""
    quantization = pytest.importorskip("torchao.quantization")
    model, ids, ours = load(folders(name)), tokens(2, 24), network(name)
    quantization.quantize_(model.model.layers, quantization.Int8WeightOnlyConfig())
    with torch.no_grad():
        for module in ours.layers.modules():
            if isinstance(module, torch.nn.Linear):
                scale = module.weight.abs().amax(1, keepdim=True) / 127.5
                module.weight.copy_((module.weight / scale).round().clamp(-128, 127) * scale)
        found, plain = model(ids).logits, network(name)(ids)
        assert relative(found, plain) > 1e-3
        assert relative(found, ours(ids)) < relative(found, plain) / 3


@pytest.mark.parametrize("name", KINDS)
def test_onnx(name, folders, tmp_path):
    """Through torch.onnx, for any batch and length (optimum-onnx 0.1.0 asks for transformers below 4.58)."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, file = load(folders(name)), tmp_path / "model.onnx"

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids):
            return self.model(input_ids=input_ids, use_cache=False).logits

    sizes = {"input_ids": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
    torch.onnx.export(
        Logits(), (tokens(2, 24),), file, dynamo=True, dynamic_shapes=sizes, input_names=["ids"]
    )
    session = runtime.InferenceSession(file)
    for batch, length in ((2, 24), (3, 40)):
        ids = tokens(batch, length, seed=1)
        found = torch.from_numpy(session.run(None, {"ids": ids.numpy()})[0])
        assert relative(found, network(name)(ids)) <= 1e-5


def packed_losses(model, out):
    """Losses of eight steps of TRL's supervised fine-tuning on packed texts of different lengths."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(260), eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    rows = [{"input_ids": tokens(1, 5 + i * 7 % 40, seed=i)[0].tolist()} for i in range(60)]
    settings = {"max_length": 64, "packing": True, "max_steps": 8, "per_device_train_batch_size": 2}
    quiet = {"report_to": [], "use_cpu": True, "logging_steps": 1, "disable_tqdm": True, "bf16": False}
    options = trl.SFTConfig(str(out), learning_rate=1e-2, save_strategy="no", **settings, **quiet)
    data = datasets.Dataset.from_list(rows)
    trainer = trl.SFTTrainer(model.train(), options, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_trl_fine_tunes_on_packed_texts(folders, tmp_path):
    """As a Llama with the same weights is; with other heads in each layer the loss falls."""
    llama = write_folder(network("uniform"), tmp_path / "llama", "llama")
    expected = packed_losses(LlamaForCausalLM.from_pretrained(llama), tmp_path / "a")
    found = packed_losses(load(folders("uniform")), tmp_path / "b")
    assert len(found) == 8 and found == pytest.approx(expected, rel=1e-5)
    losses = packed_losses(load(folders("modern")), tmp_path / "c")
    assert losses[-1] < losses[0]


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
