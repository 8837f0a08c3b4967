"""What a user does with an exported folder whose Python has torch and transformers, but not this project.

A program that test_without_project.py runs: ``first FOLDER OUT``, then ``again OUT`` in a new process.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = ["def f(x):\n    return", "a", "The quick brown fox, twice: the quick brown fox"]


def load(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


@torch.no_grad()
def compute_logits(model: Any, tokenizer: Any) -> list[torch.Tensor]:
    """Logits [tokens, vocabulary] of each prompt alone."""
    return [model(**tokenizer(prompt, return_tensors="pt")).logits[0] for prompt in PROMPTS]


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest, relative to the largest value."""
    pairs = zip(found, expected, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def write(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    """What the model writes after the prompts, as one left-padded batch."""
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    ids = model.generate(**batch, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    written: list[str] = tokenizer.batch_decode(ids[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    return written


def first(folder: Path, out: Path) -> dict[str, Any]:
    """Load, pad, merge LoRA where peft is installed, save."""
    model, tokenizer = load(folder)
    alone = compute_logits(model, tokenizer)
    torch.save(alone, out / "alone.pt")
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        rows = zip(model(**batch).logits, batch.attention_mask.bool(), strict=True)
        padded = [logits[mask] for logits, mask in rows]
    report = {
        "class": f"{type(model).__module__.partition('.')[0]}.{type(model).__name__}",
        "padded": difference(padded, alone),
        "padding": int((batch.attention_mask == 0).sum()),
        "texts": write(model, tokenizer, PROMPTS) == [write(model, tokenizer, [one])[0] for one in PROMPTS],
    }
    if importlib.util.find_spec("peft") is not None:
        import peft

        torch.manual_seed(0)
        options = peft.LoraConfig(target_modules=["lm_head", "q_proj"], r=4, init_lora_weights=False)
        adapted = peft.get_peft_model(model, options).eval()
        apart = compute_logits(adapted, tokenizer)
        model = adapted.merge_and_unload()
        report |= {
            "changed": difference(apart, alone),
            "merged": difference(compute_logits(model, tokenizer), apart),
        }
    torch.save(compute_logits(model, tokenizer), out / "saved.pt")
    model.save_pretrained(out / "saved")
    tokenizer.save_pretrained(out / "saved")
    return report


def again(out: Path) -> dict[str, Any]:
    """Load what was saved."""
    model, tokenizer = load(out / "saved")
    return {"reloaded": difference(compute_logits(model, tokenizer), torch.load(out / "saved.pt"))}


if __name__ == "__main__":
    seen = [name for name in ("model", "pretrain", "tests") if importlib.util.find_spec(name) is not None]
    assert not seen, f"the project is visible here: {seen}"
    step, *paths = sys.argv[1:]
    print(json.dumps(first(*map(Path, paths)) if step == "first" else again(Path(paths[0]))))
