"""What the card of an export claims: nothing about a model that was made elsewhere."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from model.presets import preset
from pretrain.checkpoint.state import DataIdentity, TrainingState, WorldRecord
from pretrain.hf.formats import folder_config
from pretrain.hf.model_card import model_card
from tests.helpers.networks import CONFIGS

ROOT = Path(__file__).resolve().parents[3]
MODEL = preset("prism-tiny")
RUN = {"data": "corpora/mine", "seed": 1, "optimizer": {"learning_rate": 1e-3}}
DATA = DataIdentity("t", [("c0ffee" * 4, "1")])
STATES = {
    "ours": TrainingState(step=5, run=RUN, data=DATA),
    "imported": TrainingState(data=DataIdentity("t")),
    "imported and trained": TrainingState(step=5, run=RUN, data=DATA, from_seed=False, imported=True),
    "grown": TrainingState(step=5, run=RUN, data=DATA, from_seed=False),
}


def card(state, license_name=None, format="native", model=MODEL):
    parts = {"tokenizer": SimpleNamespace(name="its own"), "last_metrics": lambda: {}}
    source = SimpleNamespace(model=model, state=STATES[state], **parts)
    text = model_card(source, model, folder_config(model, format, {}), "equal", "name", license_name)
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


@pytest.mark.parametrize(("format", "version"), [("native", "5.15"), ("llama", "5.0")])
def test_the_least_transformers_is_named(format, version):
    assert f"Needs transformers {version} or newer." in card("ours", format=format)[1]


@pytest.mark.parametrize(("name", "version"), [("gptneo", "5.15"), ("gptneo_windows", "5.19")])
def test_different_windows_need_a_newer_transformers(name, version):
    assert f"Needs transformers {version} or newer." in card("ours", model=CONFIGS[name])[1]


def test_training_is_described_as_it_was():
    optimizer = {"kind": "muon", "learning_rate": 8e-3, "weight_decay": 0.1, "gradient_clipping": 1.0}
    settings = {
        **RUN,
        "optimizer": optimizer,
        "muon": {"learning_rate": 2.83e-3, "heads": "each", "scale": "rms"},
        "llr": {"apply": "each", "measure": "excess", "low": 1.0, "high": 4.0, "every": 100},
        "schedule": {"kind": "wsd", "warmup": 0.05, "decay": 0.3, "minimum": 0.0},
        "global_batch_tokens": 1024,
    }
    world = WorldRecord(ranks=8, hardware="NVIDIA H100, 80.0 GiB", versions={"torch": "2.13.0"})
    STATES["described"] = TrainingState(step=5, run=settings, data=DATA, world=world, seconds=5400.0)
    text = card("described")[1]
    for row in (
        "| optimizer | Muon for the blocks' matrices, AdamW for everything else |",
        "| learning rate of AdamW | 0.008 |",
        "| learning rate of Muon | 0.00283 |",
        "| schedule | wsd (warmup 0.05, decay 0.3, minimum 0) |",
        "| unit of Muon | each |",
        "| scale of Muon | rms |",
        "| rates that follow spectra | each (measure excess, low 1.0, high 4.0, every 100) |",
        "| weight decay | 0.1 |",
        "| batch | 1,024 tokens |",
        "| hardware | 8 x NVIDIA H100, 80.0 GiB; torch 2.13.0 |",
        "| training time | 1.50 hours |",
        "@software{head-schedules,",
    ):
        assert row in text
    adamw = card("ours")[1]
    assert "| learning rate | 0.001 |" in adamw and "Muon" not in adamw and "spectra" not in adamw


def test_the_citation_is_that_of_the_project():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    text = card("ours")[1]
    assert f"version = {{{cited['version']}}}" in text and cited["authors"][0]["name"] in text
    assert cited["abstract"].rstrip(".") in text
