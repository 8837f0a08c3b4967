"""Exported classifiers give the scores of the run; native folders open with every auto class."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from model.transformer import Transformer
from pretrain.data.tokenizer import HuggingFaceTokenizer
from pretrain.hf import classifier
from pretrain.hf.export_folder import list_parameters, special_ids, write_description, write_weights
from pretrain.hf.formats import fold_divisor, folder_config, folder_weights
from pretrain.hf.model_folder import check_folder
from pretrain.hf.padding import folded_model
from pretrain.hf.tokenizer_files import write_tokenizer
from tests.helpers.corpora import byte_level
from tests.helpers.exports import write_folder
from tests.helpers.networks import CONFIGS, network
from tests.helpers.refusals import refused

KINDS = {
    "native": ("prism", {}),
    "llama": ("uniform", {}),
    "padded": ("prism", {}),
    "qwen3": ("qwen3", {}),
    "gpt2": ("gpt2", {}),
    "mup": (
        "prism",
        {
            "parametrization": "mup",
            "base_width": 16,
            "attention_scale": "head_dim",
            "attention_scale_base": 16,
        },
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_a_batch_equal_those_of_each_text(kind, tmp_path, capsys):
    """Through files, of texts of several lengths, padded, with what AutoTokenizer gives."""
    name, changes = KINDS[kind]
    ours = network(CONFIGS[name].replace(vocab_size=260, classes=3, **changes))
    tokenizer = HuggingFaceTokenizer(byte_level(260), "bytes")
    model = classifier.exported_model(folded_model(ours.config))
    chosen = {"padded": "llama", "mup": "native"}.get(kind, kind)
    state = SimpleNamespace(run={"data": "data/gone"})
    source = SimpleNamespace(model=ours.config, corpora=list, state=state)
    extra = special_ids(tokenizer.end_of_document) | {"dtype": torch.float32}
    config = folder_config(model, chosen, extra | classifier.label_settings(source))
    parameters = fold_divisor(list_parameters(ours), ours.config.width_ratio)
    classifier.add_padding_token(parameters)
    write_weights(tmp_path, folder_weights(model, chosen, parameters), torch.float32)
    write_description(tmp_path, config)
    write_tokenizer(tokenizer, tmp_path, 64)
    texts = ["a", "some words, and some more", "", "ünï", "<|endoftext|> inside"]
    classifier.complete_tokenizer(tmp_path, tokenizer, texts)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, trust_remote_code=True).eval()
    batch = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)(
        texts, padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        scores = theirs(**batch).logits
        for text, row in zip(texts, scores, strict=True):
            ids = torch.tensor([[*tokenizer.encode(text), tokenizer.end_of_document]])
            torch.testing.assert_close(row, ours(ids)[0, -1], atol=1e-5, rtol=0)
    assert theirs.config.id2label == {number: f"LABEL_{number}" for number in range(3)}
    assert "called LABEL_0 to LABEL_2, since the corpus 'data/gone' is not" in capsys.readouterr().out
    with refused("ForSequenceClassification", "a language model"):
        check_folder(tmp_path)


def test_examples_end_with_their_token():
    rows, ends = classifier.examples(np.arange(1, 9)[None], 0, 99)
    assert rows.tolist() == [[1, 2, 3, 4, 5, 6, 7, 0], [1, 2, 3, 4, 0, 99, 99, 99], [1, 0] + [99] * 6]
    assert ends.tolist() == [7, 4, 1]


def test_a_language_models_folder_opens_with_every_auto_class(tmp_path):
    """The decoder is that of the folder, new heads train, and what is saved is read again without ours."""
    ours: Transformer = network("prism")
    write_folder(ours, tmp_path / "hf")
    tokens = torch.randint(260, (2, 9))
    with torch.no_grad():
        hidden = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)(
            tokens, output_hidden_states=True
        ).hidden_states[-1]
    heads = {
        AutoModelForSequenceClassification: {"labels": torch.tensor([0, 1])},
        AutoModelForTokenClassification: {"labels": torch.zeros_like(tokens)},
        AutoModelForQuestionAnswering: {
            "start_positions": torch.tensor([1, 2]),
            "end_positions": torch.tensor([3, 4]),
        },
    }
    for kind, labels in heads.items():
        model = kind.from_pretrained(tmp_path / "hf", trust_remote_code=True).eval()
        output = model(tokens, output_hidden_states=True, **labels)
        torch.testing.assert_close(output.hidden_states[-1], hidden)
        output.loss.backward()
        assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
        model.save_pretrained(tmp_path / kind.__name__)
        again = kind.from_pretrained(tmp_path / kind.__name__, trust_remote_code=True).eval()
        torch.testing.assert_close(again(tokens, **labels).loss, output.loss)
