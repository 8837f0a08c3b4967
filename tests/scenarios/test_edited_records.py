"""Edited state.json and metrics.jsonl through all who read them: read, or refused in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.config import ModelConfig
from model.declared import from_plain
from model.errors import UserError
from pretrain.checkpoint.state import DataIdentity, Decided, Record, TrainingState, WorldRecord, read_state
from pretrain.config.command_line import parse_command_line
from pretrain.diagnostics.maturity import Probes, settled
from pretrain.hf.model_card import _data
from pretrain.optim.spikes import SpikeGuard
from pretrain.run.resume import check_resume, shape_change
from pretrain.run.saved import SavedRun
from tests.helpers.fuzzing import fixed, seeded

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)

# ---------------------------------------------------------------- state.json

RUN = parse_command_line(
    ["--model", "prism-nano", "--global_batch_tokens", "512", "--lr_rules", '["upper_qk"]']
).run
MODEL = RUN.build_model_config(300)
STATE = TrainingState(
    step=3,
    sequences=24,
    tokens=1536,
    seconds=1.5,
    recent={"losses": [1.0], "norms": [0.5]},
    pending=["validation"],
    released={"upper_qk": 2},
    records={"maturity": Record({"probes": [[0, 0.5], [2, 0.25]]})},
    run=RUN.to_dict(),
    decided=Decided(False, "loss", "torch", 8),
    model=MODEL.to_json(),
    data=DataIdentity("ab" * 16, [("cd" * 16, "1")]),
    world=WorldRecord(ranks=2, stage=2, versions={"python": "3.11"}, code=["abababababab"]),
)
WRITTEN = json.loads(STATE.to_json())


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (key,)
        yield from ((key, *rest) for rest in places(inner))


PLACES = list(places(WRITTEN))


@st.composite
def edited_states(draw: st.DrawFn) -> str:
    """A state.json as it is written, with up to three values changed, gone or added, or its text cut."""
    values = json.loads(json.dumps(WRITTEN))
    for place in draw(st.lists(st.sampled_from(PLACES), max_size=3)):
        inner = values
        for key in place[:-1]:
            inner = inner[key] if isinstance(inner, dict) and key in inner else inner
        if isinstance(inner, dict):
            if draw(st.booleans()):
                inner.pop(place[-1], None)
            inner[draw(st.sampled_from([place[-1], "other"]))] = draw(anything | st.integers(0, 10**400))
        elif isinstance(inner, list):
            inner[:1] = [draw(anything)]
    text = json.dumps(values)
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 9)) == 9 else text


def opened(folder: Path, state: TrainingState, model: Any = None) -> SavedRun:
    """A run of which nothing but the state is read."""
    return SavedRun(folder, cast(Any, SimpleNamespace(state=state)), model, cast(Any, None))


def understood_by_its_readers(folder: Path) -> Any:
    """A test: what read_state lets pass, those who continue, convert and describe a run can use, or
    refuse."""

    @given(edited_states())
    def test(text: str) -> None:
        (folder / "state.json").write_text(text, encoding="utf-8")
        try:
            state = read_state(folder)
            model = ModelConfig.from_json(state.model)
            saved = opened(folder, state, model)
            saved.corpora()
            _data(state.run.get("data", "builtin"), state.data.data or [])
            check_resume(state, STATE, RUN, MODEL)
            shape_change(state.world, WorldRecord(ranks=3))
            SpikeGuard(3.0, **state.recent)
            probes = from_plain(Probes, state.record("maturity"))
            settled([drift for _, drift in probes.probes], RUN.maturity)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 1500

    return test


def test_edits_at_any_depth(tmp_path):
    fixed(understood_by_its_readers(tmp_path), examples=60)


@pytest.mark.slow
def test_edits_at_any_depth_at_length(tmp_path):
    seeded(understood_by_its_readers(tmp_path), examples=500)


# ---------------------------------------------------------------- metrics.jsonl

# Lines that are no rows are in tests/pretrain/metrics/test_file.py.
NAMES = ["train_loss", "val_loss", "val_bpb", "grad_norm", "tokens", "evaluation/x/acc", "lr/base/decay"]
rows = st.dictionaries(
    st.sampled_from(NAMES) | st.text(max_size=3), anything | st.integers(0, 40), max_size=5
)


def test_last_figures_are_numbers(tmp_path):
    @given(st.lists(rows, max_size=8))
    def test(some: list[dict[str, Any]]) -> None:
        lines = [json.dumps(row | {"step": step}) for step, row in enumerate(some)]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
        try:
            found = opened(tmp_path, TrainingState(step=4)).last_metrics()
        except UserError as error:
            found = {}
            line = r"metrics: .*metrics\.jsonl, line \d: .* is not valid; give a number.*"
            assert re.fullmatch(line, str(error))
        assert all(type(value) in (int, float) for value in found.values())

    fixed(test, examples=100)
