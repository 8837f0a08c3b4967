"""What differs in the export of a sequence classifier: its head, its tokenizer, and what is compared.

transformers' classes read the last token that is not ``pad_token_id``. A run's examples end with the
end-of-document token, and its class is read there. So the folder has a padding token that no text contains,
and its tokenizer ends each text with the end-of-document token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from model.config import ModelConfig
from model.errors import UserError, quote
from model.transformer import Transformer
from pretrain.classification.examples import read_classes
from pretrain.data.tokenizer import Tokenizer
from pretrain.run.saved import SavedRun
from pretrain.utils.format import log_line

PADDING = "<|head_schedule_padding|>"


def exported_model(model: ModelConfig) -> ModelConfig:
    """The model of the folder: with a row for the padding token."""
    return model.replace(vocab_size=model.vocab_size + 1)


def add_padding_token(parameters: dict[str, Tensor]) -> None:
    """Change a run's parameters by name to those of exported_model."""
    embedding = parameters["token_embedding.weight"]
    parameters["token_embedding.weight"] = torch.cat([embedding, torch.zeros_like(embedding[:1])])


def label_settings(source: SavedRun) -> dict[str, Any]:
    """Fields of the folder's config.json: its padding token, and the classes by name where the run's data are
    on this machine; else prints a note."""
    count = source.model.classes or 0
    names = next((read_classes(corpus) for corpus in source.corpora()), [])
    if len(names) != count:
        where = f"the corpus {quote(source.state.run.get('data', 'builtin'))} is not found from here"
        print(log_line("note", f"the classes are called LABEL_0 to LABEL_{count - 1}, since {where}"))
        names = [f"LABEL_{number}" for number in range(count)]
    return {
        "pad_token_id": source.model.vocab_size,
        "num_labels": count,
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
        "problem_type": "single_label_classification",
    }


def complete_tokenizer(folder: Path, tokenizer: Tokenizer, texts: Iterable[str]) -> int:
    """Let the tokenizer in an exported *folder* end each text as the run's examples end, cut ones too, and
    give it the padding token; then compare it with the run's on *texts*.

    Returns:
        How many tokens were compared.

    Raises:
        UserError: they differ.
    """
    end, padding = tokenizer.end_of_document, tokenizer.vocab_size
    definition = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    definition["added_tokens"].append({"id": padding, "content": PADDING, **flags, "special": True})
    name = config["eos_token"]
    sequences = [{"Sequence": {"id": part, "type_id": 0}} for part in "AB"]
    last = {"SpecialToken": {"id": name, "type_id": 0}}
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [sequences[0], last],
        "pair": [*sequences, last],
        "special_tokens": {name: {"id": name, "ids": [end], "tokens": [name]}},
    }
    config |= {"pad_token": PADDING, "padding_side": "right"}
    (folder / "tokenizer.json").write_text(json.dumps(definition, indent=2, ensure_ascii=False), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    compared = 0
    for text in texts:
        expected = [*tokenizer.encode(text), end]
        cut = loaded(text, truncation=True, max_length=8).input_ids
        if loaded(text, verbose=False).input_ids != expected or (cut[:-1], cut[-1]) != (
            expected[:-1][:7],
            end,
        ):
            raise UserError(
                f"tokenizer: the exported tokenizer gives other ids than {tokenizer.name} for {text!r:.80}"
            )
        compared += len(expected)
    if loaded.pad_token_id != padding:
        raise UserError(f"tokenizer: the exported tokenizer pads with {loaded.pad_token_id}, not {padding}")
    return compared


def examples(tokens: np.ndarray, end: int, padding: int) -> tuple[Tensor, Tensor]:
    """Examples of several lengths from token ids [n, T]: int64 [3 n, T], each ended with *end* and padded on
    the right, and the positions of the ends [3 n]."""
    length = tokens.shape[1]
    ends = torch.tensor([length - 1, length // 2, 1]).clamp(max=length - 1).repeat(len(tokens))
    rows = torch.from_numpy(tokens).repeat_interleave(3, 0)
    place = torch.arange(length)
    rows = torch.where(place < ends[:, None], rows, padding)
    return torch.where(place == ends[:, None], end, rows), ends


@torch.no_grad()
def our_scores(network: Transformer, rows: Tensor, ends: Tensor, end: int) -> Tensor:
    """Logits [n, 1, classes] of our classifier at the *ends* of examples, whose padding is *end* in a run."""
    padded = torch.where(torch.arange(rows.shape[1]) > ends[:, None], end, rows)
    return network(padded)[torch.arange(len(rows)), ends][:, None]


@torch.no_grad()
def their_scores(network: Any, rows: Tensor) -> Tensor:
    """The same of a transformers model, which finds the ends itself, in one batch."""
    mask = (rows != network.config.pad_token_id).long()
    return network(rows, attention_mask=mask, use_cache=False).logits[:, None]
