"""Describes the model to DeepSpeed's own checkpoint converter; stored with every checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model.parameters import ParameterSpec


def universal_info(specs: Mapping[str, ParameterSpec], vocab_size: int) -> dict[str, Any]:
    """Describe how each parameter's tensor-parallel parts are joined, as DeepSpeed's converter reads it.

    The converter matches patterns from a name's start, and refuses one that matches nothing. Parameters
    without a pattern are joined along dimension 0; of vocabularies it keeps the first *vocab_size* rows.
    """
    from deepspeed.checkpoint import constants

    cut = {name: spec.shard_dimension for name, spec in specs.items()}
    return {
        constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        constants.TP_REPLICATED_PARAMETER_PATTERNS: _patterns(name for name in cut if cut[name] is None),
        constants.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: _patterns(name for name in cut if cut[name] == 1),
        constants.VOCABULARY_PARAMETER_PATTERNS: _patterns(name for name in cut if specs[name].vocabulary),
        constants.ORIGINAL_VOCAB_SIZE: vocab_size,
    }


def _patterns(names: Iterable[str]) -> list[str]:
    """Anchored patterns that match the names; those of all layers share one."""
    numbered = (re.sub(r"^layers\\\.\d+\\\.", r"layers\\.\\d+\\.", re.escape(name)) for name in names)
    return [f"^{pattern}$" for pattern in dict.fromkeys(numbered)]
