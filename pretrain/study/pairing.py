"""What two runs of one seed have in common: the order of the data, and the weights that begin equal."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from model.config import ModelConfig
from model.initialization import initial_distribution
from model.parameters import parameter_roles
from model.transformer import Transformer
from pretrain.config.run_config import RunConfig
from pretrain.study.study_file import Study


@dataclass(frozen=True)
class Pairing:
    """What the runs of a variant share with the baseline's run of the same seed."""

    data: bool
    """They read the same sequences in the same order."""
    weights: float
    """Share of the parameters that begin with the same values."""

    def __str__(self) -> str:
        weights = {1.0: "the same", 0.0: "others"}.get(self.weights, f"{self.weights:.1%} the same")
        return f"data order: {'the same' if self.data else 'another'}; first weights: {weights}"


def pairing(run: RunConfig, baseline: RunConfig) -> Pairing:
    """What *run* and *baseline* share at the start, from their configurations."""
    if run.seed != baseline.seed:
        return Pairing(False, 0.0)
    models = _model(run), _model(baseline)
    data = models[0].context_length == models[1].context_length and all(
        getattr(run, name) == getattr(baseline, name)
        for name in ("data", "tokenizer", "vocab_size", "task", "document_mask")
    )
    first, second = map(_initial, models)
    equal = sum(math.prod(values[0]) for name, values in first.items() if second.get(name) == values)
    return Pairing(data, equal / sum(math.prod(shape) for shape, _ in first.values()))


def _model(run: RunConfig) -> ModelConfig:
    """The model of step 0. A prepared corpus's vocabulary is not known here, and taken to be the preset's."""
    return run.build_model_config(run.vocab_size if run.data == "builtin" else None)


def _initial(model: ModelConfig) -> dict[str, tuple[tuple[int, ...], tuple[float, float, int]]]:
    """Shape and distribution of each parameter: with its name and the seed, they decide its first values."""
    with torch.device("meta"):
        network = Transformer(model)
    roles = parameter_roles(network)
    return {
        name: (tuple(value.shape), initial_distribution(name, roles[name], value.shape, model))
        for name, value in network.named_parameters()
    }


def pairing_lines(study: Study) -> list[str]:
    """A line for each comparison, or for each of its variants where they differ."""
    first = {(planned.comparison, planned.variant): planned.run for planned in study.of_first_seed}
    found: dict[tuple[str, str, str], list[str]] = {}
    for comparison in study.comparisons:
        for variant in comparison.variants:
            name = comparison.baseline_of(variant)
            if name != variant:
                shared = pairing(first[comparison.name, variant], first[comparison.name, name])
                found.setdefault((comparison.name, name, str(shared)), []).append(variant)
    return [
        f"{f'{where}: ' * bool(where)}{', '.join(names)} with {baseline}, seed by seed: {text}"
        for (where, baseline, text), names in found.items()
    ]
