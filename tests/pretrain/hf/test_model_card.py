"""What the card of an export claims: nothing about a model that was made elsewhere."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import yaml

from model.presets import preset
from pretrain.checkpoint.state import DataIdentity, TrainingState
from pretrain.hf.formats import folder_config
from pretrain.hf.model_card import model_card

MODEL = preset("prism-tiny")
RUN = {"data": "corpora/mine", "seed": 1, "optimizer": {"learning_rate": 1e-3}}
DATA = DataIdentity("t", [("c0ffee" * 4, "1")])
STATES = {
    "ours": TrainingState(step=5, run=RUN, data=DATA),
    "imported": TrainingState(data=DataIdentity("t")),
    "imported and trained": TrainingState(step=5, run=RUN, data=DATA, from_seed=False, imported=True),
    "grown": TrainingState(step=5, run=RUN, data=DATA, from_seed=False),
}


def card(state, license_name=None, format="native"):
    parts = {"tokenizer": SimpleNamespace(name="its own"), "last_metrics": lambda: {}}
    source = SimpleNamespace(model=MODEL, state=STATES[state], **parts)
    text = model_card(source, MODEL, folder_config(MODEL, format, {}), "equal", "name", license_name)
    return yaml.safe_load(text.split("---\n")[1]), text


LICENCES = {
    ("ours", None): None,
    ("ours", "mit"): "mit",
    ("imported", None): None,
    ("imported", "mit"): "mit",
    ("imported and trained", None): None,
}


@pytest.mark.parametrize(("given", "expected"), LICENCES.items())
def test_a_licence_is_named_only_when_it_is_given(given, expected):
    front, text = card(*given)
    assert front.get("license") == expected
    assert expected is not None or ("licen" not in text and "apache" not in text)


def test_the_data_is_what_the_run_has_read():
    assert "| data | mine; content c0ffeec0ffee |" in card("ours")[1]
    for state in ("ours", "grown"):
        assert "imported from another model" not in card(state)[1]
    imported = card("imported")[1]
    assert "| data |" not in imported and "standard library" not in imported
    both = card("imported and trained")[1]
    assert "| data | mine; content c0ffeec0ffee |" in both
    for text in (imported, both):
        assert "| weights at step 0 | imported from another model; what that was trained on" in text


@pytest.mark.parametrize(("format", "version"), [("native", "5.14"), ("llama", "5.0")])
def test_the_least_transformers_is_named(format, version):
    assert f"Needs transformers {version} or newer." in card("ours", format=format)[1]
