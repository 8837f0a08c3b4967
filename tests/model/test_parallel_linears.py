"""The parallel layers: the same names, the same model whatever t, clean state dicts, marks that DeepSpeed
reads."""

import pytest
import torch
import torch.distributed as dist

from model.blocks import block
from model.initialization import initialize
from model.linears import shard_dim
from model.parameters import parameter_roles, parameter_specs
from model.process_grid import start_grid
from model.transformer import Transformer
from tests.helpers.distributed import run_distributed

CONFIG = block(
    "gpt2", vocab_size=260, context_length=12, d_model=24, ffn_width=48, heads=(3, 4, 1), tie_embeddings=False
)
GATED = block("llama", vocab_size=260, context_length=12, d_model=24, ffn_width=48, heads=(6,), kv_heads=(3,))


def shards_of(config):
    model = Transformer(config, start_grid(dist.get_world_size()))
    initialize(model, 3)
    marks = {
        name: (bool(getattr(p, "tensor_model_parallel", False)), shard_dim(p))
        for name, p in model.named_parameters()
    }
    state = model.state_dict()
    model.load_state_dict(state)
    return state, marks, parameter_roles(model)


@pytest.mark.parametrize("config", [CONFIG, GATED], ids=["gpt2", "llama"])
@pytest.mark.parametrize("tensor_parallel", [2, 3])
def test_shards_are_slices_of_the_same_model(config, tensor_parallel):
    reference = Transformer(config)
    initialize(reference, 3)
    whole = reference.state_dict()
    results = run_distributed(shards_of, tensor_parallel, config)
    cuts = {name: spec.shard_dimension for name, spec in parameter_specs(config).items()}
    cut_by_rows = ("q", "k", "v", "gate", "up")
    columns = (*(f"{part}.weight" for part in (*cut_by_rows, "output", "token_embedding")),)
    columns += (*(f"{part}.bias" for part in cut_by_rows),)
    for state, marks, roles in results:
        assert list(state) == list(whole)  # no _extra_state, the same names in the same order
        assert roles == parameter_roles(reference)
        assert {name: dim for name, (_, dim) in marks.items()} == cuts
        for name, mark in marks.items():
            if name.endswith(columns):
                assert mark == (True, 0), name
            elif name.endswith(("o.weight", "down.weight")):
                assert mark == (True, 1), name
            else:  # norms, positions, and the biases that are added once, after the sum
                assert mark == (False, None), name
    for name, value in whole.items():
        parts = [state[name] for state, *_ in results]
        dim = results[0][1][name][1]
        together = parts[0] if dim is None else torch.cat(parts, dim)
        if name in ("token_embedding.weight", "output.weight"):  # t = 3 pads to a multiple of 384
            assert together.shape[0] == config.padded_vocab_size(tensor_parallel)
            assert torch.count_nonzero(together[config.vocab_size :]) == 0
            together, value = together[: config.vocab_size], value[: config.vocab_size]
        assert torch.equal(together, value), name
        assert dim is not None or all(torch.equal(part, value) for part in parts), name
