"""What two runs of one seed have in common: the order of the data, and the weights that begin equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model.config import ModelConfig
from model.parameters import parameter_roles
from model.transformer import Transformer
from pretrain.config.run_config import RunConfig
from pretrain.study.study_file import Comparison, PlannedRun, Study


@dataclass(frozen=True)
class Pairing:
    """What the runs of a variant share with the baseline's run of the same seed."""

    data: bool
    """They read the same sequences in the same order."""
    weights: float
    """Share of the parameters that begin with the same values."""

    def __str__(self) -> str:
        weights = (
            "the same"
            if self.weights == 1
            else "others"
            if self.weights == 0
            else f"{self.weights:.1%} the same"
        )
        return f"data order: {'the same' if self.data else 'another'}; first weights: {weights}"


def pairing(run: RunConfig, baseline: RunConfig) -> Pairing:
    """What *run* and *baseline* share at the start, from their configurations.

    Weights are drawn from (seed, parameter name, shape) with a spread that their configuration gives. Two parameters
    begin equal if all of these agree.
    """
    same_seed = run.seed == baseline.seed
    models = [config.build_model_config() for config in (run, baseline)]
    data = same_seed and all(
        getattr(run, name) == getattr(baseline, name)
        for name in ("data", "tokenizer", "vocab_size", "task", "document_mask")
    )
    data = data and models[0].context_length == models[1].context_length
    if not same_seed:
        return Pairing(data, 0.0)
    first, second = (_drawn(model) for model in models)
    equal = sum(size for name, (size, draw) in first.items() if name in second and second[name][1] == draw)
    return Pairing(data, equal / sum(size for size, _ in first.values()))


def _drawn(model: ModelConfig) -> dict[str, tuple[int, tuple[object, ...]]]:
    """The size of every parameter, and what its first values follow from."""
    with torch.device("meta"):
        network = Transformer(model)
    roles = parameter_roles(network)
    found: dict[str, tuple[int, tuple[object, ...]]] = {}
    for name, parameter in network.named_parameters():
        role = roles[name]
        fixed = role.kind in ("norm", "bias")
        # Projections that write into the residual stream are scaled by the depth; the vocabulary sets the drawn rows.
        draw = () if fixed else (model.init_std, model.vocab_size)
        if role.part == "o" or name.endswith(".ffn.down.weight"):
            draw = (*draw, model.num_layers)
        found[name] = (parameter.numel(), (tuple(parameter.shape), role.kind, *draw))
    return found


def pairing_lines(study: Study) -> list[str]:
    """A line for each comparison, or for each of its variants where they differ."""
    first = {
        (planned.comparison, planned.variant): planned
        for planned in study.runs
        if planned.seed == study.seeds[0]
    }
    return [line for comparison in study.comparisons for line in _lines(comparison, first)]


def _lines(comparison: Comparison, first: dict[tuple[str, str], PlannedRun]) -> list[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for variant in comparison.variants:
        name = comparison.baseline_of(variant.name)
        if name != variant.name:
            text = str(pairing(first[comparison.name, variant.name].run, first[comparison.name, name].run))
            found.setdefault((name, text), []).append(variant.name)
    where = f"{comparison.name}: " if comparison.name else ""
    return [
        f"{where}{', '.join(names)} with {baseline}, seed by seed: {text}"
        for (baseline, text), names in found.items()
    ]
