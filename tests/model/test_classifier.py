"""A sequence classifier against transformers' LlamaForSequenceClassification and plain fp64 products."""

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForSequenceClassification

from model.errors import UserError
from model.initialization import initialize
from model.parameters import parameter_roles, parameter_specs
from model.process_grid import ProcessGrid
from model.transformer import Transformer
from tests.helpers.networks import CONFIGS
from tests.model.test_transformer import LLAMA_NAMES, copy_weights, parameters

CONFIG = CONFIGS["uniform"].replace(classes=3)
LENGTHS = (7, 20, 1, 12)
PADDING = 259


def classifier(config=CONFIG, dtype=torch.float32):
    """A classifier whose weights are so large that every part of it matters."""
    model = Transformer(config).to(dtype)
    initialize(model, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


def examples():
    """Tokens [4, 20] of LENGTHS, padded, labels at their ends, and the labels alone."""
    tokens = torch.randint(0, 258, (4, 20), generator=torch.Generator().manual_seed(3))
    labels, classes = torch.full((4, 20), -100), torch.tensor([2, 0, 1, 1])
    for row, length in enumerate(LENGTHS):
        tokens[row, length:] = PADDING
        labels[row, length - 1] = classes[row]
    return tokens, labels, classes


def as_transformers(ours):
    """transformers' model with the same weights."""
    config = ours.config
    sizes = {"vocab_size": config.vocab_size, "hidden_size": config.d_model, "num_labels": config.classes}
    layers = {"num_hidden_layers": config.num_layers, "num_attention_heads": config.heads[0]}
    widths = {"intermediate_size": config.ffn_width, "max_position_embeddings": config.context_length}
    others = {"rms_norm_eps": config.norm_eps, "rope_theta": config.rope_base, "pad_token_id": PADDING}
    theirs = LlamaForSequenceClassification(LlamaConfig(**sizes, **layers, **widths, **others))
    names = {**LLAMA_NAMES, "classifier.weight": "score.weight"}
    copy_weights(parameters(ours), parameters(theirs), names, config.num_layers)
    return theirs.eval()


def test_equals_transformers():
    ours = classifier()
    theirs = as_transformers(ours)
    tokens, labels, classes = examples()
    with torch.no_grad():
        expected = theirs(tokens, labels=classes)
        found = ours(tokens)
    ends = torch.tensor(LENGTHS) - 1
    # fp32: another order of sums, over three layers.
    torch.testing.assert_close(found[torch.arange(4), ends], expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours(tokens, labels).detach(), expected.loss, rtol=1e-4, atol=1e-4)


def test_the_gradient_is_that_of_plain_products():
    ours = classifier(dtype=torch.float64)
    tokens, labels, classes = examples()
    ours(tokens, labels).backward()
    found = {name: parameter.grad.clone() for name, parameter in ours.named_parameters()}
    ours.zero_grad()
    entered = []
    handle = ours.final_norm.register_forward_hook(lambda module, inputs, output: entered.append(output))
    ours(tokens)
    handle.remove()
    ends = torch.tensor(LENGTHS) - 1
    logits = entered[0][torch.arange(4), ends] @ ours.classifier.weight.T
    F.cross_entropy(logits, classes).backward()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-14, msg=name)


def test_padding_changes_nothing():
    ours = classifier(CONFIGS["prism"].replace(classes=4), torch.float64)
    tokens, _, _ = examples()
    other = tokens.clone()
    for row, length in enumerate(LENGTHS):
        other[row, length:] = row
    ends = torch.arange(4), torch.tensor(LENGTHS) - 1
    assert torch.equal(ours(tokens)[ends], ours(other)[ends])


@pytest.mark.parametrize("tied", [True, False])
def test_counts_and_roles(tied):
    config = CONFIG.replace(classes=5, heads=(4,), tie_embeddings=tied)
    model = Transformer(config)
    assert model.output is None and not config.tied
    assert config.num_parameters(padded=True) == sum(p.numel() for p in model.parameters())
    language = config.replace(classes=None)
    assert language.matmul_parameters() - config.matmul_parameters() == (260 - 5) * 48
    role = parameter_roles(model)["classifier.weight"]
    assert (role.kind, role.part, role.layer) == ("matrix", "output", None)
    spec = parameter_specs(config)["classifier.weight"]
    assert (spec.shape, spec.shard_dimension, spec.vocabulary) == ((5, 48), None, False)
    assert config.from_json(config.to_json()) == config and "classes" not in language.to_json()


def test_sequence_parallelism_is_refused():
    with pytest.raises(UserError, match="sequence_parallel: does not go with a sequence classifier"):
        Transformer(CONFIG, ProcessGrid(sequence_parallel=True))
