"""Draws small models with random schedules of every part of a layer."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from model.blocks import block
from model.config import ModelConfig


def draw_model(draw: st.DrawFn, t: int) -> ModelConfig:
    """A model of at most three layers and 16 positions, whose FFN and attention widths t divides."""
    layers = draw(st.integers(1, 3))

    def schedule(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=layers, max_size=layers))

    heads = schedule(st.integers(0, 8))
    kv_heads = [draw(st.sampled_from([k for k in range(1, h + 1) if h % k == 0] or [0])) for h in heads]
    ffn_width = [t * draw(st.integers(0 if h else 1, 6)) for h in heads]
    head_dim = [2 * t * draw(st.integers(1, 2)) if k % t else 2 * draw(st.integers(1, 4)) for k in kv_heads]
    windows = schedule(st.one_of(st.none(), st.integers(1, 20)))
    kind = draw(st.sampled_from(["llama", "gpt2", "gptneo"]))
    sizes: dict[str, Any] = {
        "vocab_size": draw(st.integers(2, 40)),
        "context_length": 16,
        "d_model": draw(st.integers(3, 20)),
    }
    sizes |= {"ffn_width": ffn_width, "tie_embeddings": draw(st.booleans())}
    schedules = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "local_window": windows}
    if kind == "llama":
        sizes["rope_base"] = schedule(st.sampled_from([None, 10.0, 1e4]))
        sizes["rotary_share"] = [2 * draw(st.integers(1, dim // 2)) / dim for dim in head_dim]
    if draw(st.booleans()):
        sizes["block_width"] = schedule(st.integers(2, 24))
    switches = {
        "attention_gate": draw(st.sampled_from(["none", "none", "head", "element"])),
        "qk_norm": draw(st.sampled_from(["none", "plain", "weighted"])),
    }
    return block(kind, **sizes, **schedules, **switches)
