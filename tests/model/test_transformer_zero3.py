"""The network under a real DeepSpeed ZeRO-3 engine, whose parameters are flat and partitioned.

Compared with the same training in plain torch. The optimizer is SGD: it leaves rounding as small
as it is, while Adam divides near-zero gradients by their own size and makes percents of it.
"""

import pytest
import torch

from model.initialization import initialize
from model.parameters import parameter_roles
from model.presets import preset
from model.transformer import Transformer
from tests.helpers.distributed import run_distributed
from tests.helpers.marks import slow

STEPS, LR = 4, 1.0


def tokens_of(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 260, (2, 65), generator=generator)


def train_partitioned(config, checkpointing, bf16):
    """Build inside zero.Init, initialize by gathering, train; return what a rank saw."""
    import deepspeed

    from pretrain.engine.patches import prepare_deepspeed

    prepare_deepspeed()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    ds_config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
        },  # partition small ones too
        "gradient_clipping": 0.0,  # DeepSpeed 0.19 clips to 1.0 when this is absent
        "bf16": {"enabled": bf16},
        "zero_allow_untested_optimizer": True,
    }
    with deepspeed.zero.Init(config_dict_or_path=ds_config):
        model = Transformer(config, checkpoint_activations=checkpointing)
    flat = all(parameter.ndim == 1 for parameter in model.parameters())
    initialize(model, 0, lambda p: deepspeed.zero.GatheredParameters(p, modifier_rank=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
    roles = parameter_roles(engine.module)
    losses = []
    for step in range(STEPS):
        batches = [tokens_of(step, r) for r in range(world)]
        batch = batches[rank]
        loss = engine(batch[:, :-1], batch[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with torch.no_grad():
        logits = engine(batches[0][:, :-1])
    whole = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            whole[name] = parameter.detach().float().clone()
    engine.destroy()
    return flat, roles, losses, logits.float(), whole


def train_whole(config, world):
    """The same run with plain torch: the mean of the ranks' gradients in one process."""
    model = Transformer(config)
    initialize(model, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = [[] for _ in range(world)]
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world):
            batch = tokens_of(step, rank)
            loss = model(batch[:, :-1], batch[:, 1:])
            (loss / world).backward()
            losses[rank].append(loss.item())
        optimizer.step()
    with torch.no_grad():
        logits = model(tokens_of(STEPS - 1, 0)[:, :-1])
    return losses, logits, dict(model.named_parameters()), parameter_roles(model)


CASES = [("prism-nano", False, False, 1), ("gpt2-nano", True, True, 1), ("prism-nano", True, True, 2)]
CASES += slow([("prism-nano", True, False, 1), ("prism-nano", True, True, 1)])


@pytest.mark.parametrize(("name", "tied", "checkpointing", "world"), CASES)
def test_training_under_zero3_equals_plain_training(name, tied, checkpointing, world):
    config = preset(name).replace(tie_embeddings=tied)
    losses, logits, weights, roles = train_whole(config, world)
    results = run_distributed(train_partitioned, world, config, checkpointing, False, timeout=120)
    for rank, (flat, found_roles, found_losses, found_logits, found_weights) in enumerate(results):
        assert flat and found_roles == roles
        assert found_losses == pytest.approx(losses[rank], rel=1e-6)
        # fp32 rounding, summed in another order: a hundred units in the last place after four steps
        assert (found_logits - logits).abs().max() <= 1e-5
        for key, weight in weights.items():
            assert (found_weights[key] - weight).abs().max() <= 1e-6, key
        for key in ("token_embedding.weight", "output.weight"):
            if key in found_weights:
                assert torch.count_nonzero(found_weights[key][260:]) == 0
