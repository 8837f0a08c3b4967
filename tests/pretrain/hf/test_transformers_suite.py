"""transformers' own tests of a model class, on the native classes; ``.ci/transformers-suite`` fetches them.

They come from the sdist of the installed transformers; TRANSFORMERS_TESTS names its folder ``tests``. The
sdist lacks two of the mixins that they import, for generation and for exporters. Stand-ins are in their
place; tests of our own cover generation (test_modeling_head_schedule.py).
"""

from __future__ import annotations

import importlib
import os
import sys
import types
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pretrain.hf import modeling_head_schedule as native
from pretrain.hf.configuration_head_schedule import HeadScheduleConfig

pytestmark = pytest.mark.slow
TESTS = os.environ.get("TRANSFORMERS_TESTS", "")
if not TESTS:
    pytest.skip(
        "TRANSFORMERS_TESTS is not set: .ci/transformers-suite fetches transformers' tests",
        allow_module_level=True,
    )
pytest.importorskip("parameterized")


def load_common_tests(folder: Path) -> Any:
    """The module of ModelTesterMixin from the *folder* tests of transformers' sdist, with stand-ins for the
    mixins that it lacks."""
    package = types.ModuleType("transformers_tests")
    package.__path__ = [str(folder)]
    sys.modules["transformers_tests"] = package
    for name, mixin in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        parent, _, child = f"transformers_tests.{name}".rpartition(".")
        sys.modules[parent] = types.ModuleType(parent)
        module = types.ModuleType(f"{parent}.{child}")
        setattr(module, mixin, type(mixin, (), {}))
        sys.modules[f"{parent}.{child}"] = module
    return importlib.import_module("transformers_tests.test_modeling_common")


common = load_common_tests(Path(TESTS))

SIZES: dict[str, Any] = {
    **{"vocab_size": 99, "hidden_size": 48, "intermediate_size": 37, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 12, "initializer_range": 0.02},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "windows": {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
    "qk_norm": {"qk_norm": "weighted", "attention_gate": "head"},
    "capped": {
        **{"final_logit_softcapping": 3.0, "base_width": 24, "parametrization": "mup"},
        **{"attention_scale": "head_dim", "attention_scale_base": 12.0, "tie_word_embeddings": False},
    },
    "learned": {
        **{"positions": "learned", "norm": "layernorm", "norm_bias": True, "attention_bias": "all"},
        **{"mlp_bias": True, "feed_forward": "mlp", "hidden_act": "gelu"},
    },
    "nope": {"rope_theta": [10000.0, None], "partial_rotary": 0.5, "attention_bias": "qkv"},
    "yarn": {
        "rotary_scaling": {"type": "yarn", "factor": 4.0, "original_context_length": 16, "beta_fast": 32.0}
        | {"beta_slow": 1.0, "attention_factor": None, "truncate": True}
    },
    "per_layer": {
        "per_layer_config": {0: {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24}}
    },
    "absent": {"per_layer_config": {0: {"num_attention_heads": 0, "num_key_value_heads": 0, "head_dim": 0}}},
}


MAPPINGS = {
    "Model": "MODEL_MAPPING_NAMES",
    "ForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "ForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "ForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "ForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
}


NOT_APPLICABLE = {
    "test_attention_outputs": "expects as many heads in every layer, and attention in each",
}
"""Tests that models whose layers differ cannot pass, with the reason."""


class ModelTester:
    """What ModelTesterMixin asks for a small model of a variant."""

    batch_size, seq_length, is_training = 3, 7, True
    num_hidden_layers, num_attention_heads, hidden_size = 2, 4, 48

    def __init__(self, parent: Any, changes: dict[str, Any]) -> None:
        self.parent, self.changes = parent, changes

    def get_config(self) -> HeadScheduleConfig:
        return HeadScheduleConfig(**SIZES | self.changes)

    def prepare_config_and_inputs_for_common(self) -> tuple[HeadScheduleConfig, dict[str, torch.Tensor]]:
        ids = torch.randint(3, 99, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def make_tests(name: str) -> Any:
    class Tests(common.ModelTesterMixin, common.GenerationTesterMixin, unittest.TestCase):  # type: ignore[name-defined]
        all_model_classes = (
            native.HeadScheduleModel,
            native.HeadScheduleForCausalLM,
            native.HeadScheduleForSequenceClassification,
            native.HeadScheduleForTokenClassification,
            native.HeadScheduleForQuestionAnswering,
        )

        def setUp(self) -> None:
            self.model_tester = ModelTester(self, VARIANTS[name])
            for kind, mapping in MAPPINGS.items():  # which labels the tests give
                named = {"head_schedule": f"HeadSchedule{kind}"}
                self.enterContext(mock.patch.dict(getattr(common, mapping), named))
            # For the tests that load with auto classes. Nothing may stay: others load the code in a folder.
            classifier = {HeadScheduleConfig: native.HeadScheduleForSequenceClassification}
            entries: tuple[tuple[Any, dict[Any, Any]], ...] = (
                (CONFIG_MAPPING, {"head_schedule": HeadScheduleConfig}),
                (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, classifier),
            )
            for registry, entry in entries:
                self.enterContext(mock.patch.dict(registry._extra_content, entry))
            method = self._testMethodName
            if "per_layer_config" in VARIANTS[name] and method in NOT_APPLICABLE:
                self.skipTest(NOT_APPLICABLE[method])

    Tests.__name__ = Tests.__qualname__ = f"Test_{name}"
    return Tests


for _name in VARIANTS:
    globals()[f"Test_{_name}"] = make_tests(_name)
