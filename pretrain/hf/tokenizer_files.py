"""Writes a run's tokenizer as files that transformers' AutoTokenizer reads, with the same ids."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from model.errors import UserError
from pretrain.data.same_tokenizer import AWKWARD_TEXTS, put_inside
from pretrain.data.sentencepiece_bpe import byte_fallback_bpe, user_defined_texts
from pretrain.data.tokenizer import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
)


def write_tokenizer(tokenizer: Tokenizer, out: Path, context_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json. A SentencePiece model, of which tokenizer.json is a
    translation, is also written, for importing it again and for llama.cpp's converter.

    Both files give a text the run's ids: nothing is put before or after it, and its control strings are text
    if they were text in training.

    Raises:
        UserError: a SentencePiece model whose ids no tokenizer.json can give.
    """
    tokenizer.save(out)
    more: dict[str, Any] = {"add_bos_token": False}  # llama.cpp would otherwise put one before some texts
    if isinstance(tokenizer, SentencePieceTokenizer):
        backend = byte_fallback_bpe(tokenizer)
        definition = json.loads(backend.to_str())
        end = backend.id_to_token(tokenizer.end_of_document)
        more |= {"unk_token": backend.model.unk_token, "add_prefix_space": False}
    else:
        definition = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))
        config = json.loads((out / "tokenizer_config.json").read_text(encoding="utf-8"))
        end = config["eos_token"]
    definition["post_processor"] = _without_templates(definition.get("post_processor"))
    if not any(len(tokenizer.encode(text)) == 1 for text in tokenizer.special_texts()):
        # transformers makes an added token of each that is named below, and would look for it in texts.
        more["split_special_tokens"] = True
        known = definition["model"]["vocab"]
        definition["added_tokens"] = [
            token
            for token in definition["added_tokens"]
            if not token["special"] or token["content"] not in known
        ]
    (out / "tokenizer.json").write_text(
        json.dumps(definition, indent=2, ensure_ascii=False), encoding="utf-8"
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        # Documents end with this token and begin after it: it is what stands before a text.
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "padding_side": "left",
        # transformers 4 would also give token_type_ids, which GPT-2 adds to the embeddings.
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "name_or_path": tokenizer.name,
        **more,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _without_templates(processor: Any) -> Any:
    """A post-processor of a tokenizer.json without what adds tokens to a text: training has none of them."""
    if processor is None or processor["type"] == "ByteLevel":  # which trims offsets
        return processor
    steps = [step for step in processor.get("processors") or [] if step["type"] == "ByteLevel"]
    return steps[0] if steps else None


TEMPLATE_NOTE = (
    "the tokenizer's template adds tokens such as <s> to a text; nothing here does, in training or scoring, "
    "which lowers the scores of a model that was trained with them"
)


def has_template(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer's own definition adds tokens to a text, such as <s>; here none are added."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return False
    given = json.loads(tokenizer.definition()).get("post_processor")
    return bool(given != _without_templates(given))


def describe_conventions(tokenizer: Tokenizer, folder: Path) -> list[str]:
    """What the tokenizer in the exported *folder* does otherwise than its users may expect."""
    lines = []
    if has_template(tokenizer):
        lines.append("the tokenizer's template, which adds tokens to a text, is left out: training had none")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    if config.get("split_special_tokens"):
        lines.append(
            "control strings such as <|endoftext|> in a text are text, as in training; "
            "tokenizer(text, split_special_tokens=False) makes tokens of them"
        )
    return lines


def check_tokenizer(folder: Path, tokenizer: Tokenizer, texts: Iterable[str]) -> tuple[int, list[str]]:
    """Load the written tokenizer again, with AutoTokenizer, from tokenizer.json alone and as an import does,
    and compare their ids with ours, on *texts*, awkward texts, and texts with control strings in them.

    Returns:
        How many tokens were compared, and a line for each reader that takes a control string for something
        else than the run does.

    Raises:
        UserError: they differ on a text without control strings.
    """
    import tokenizers
    from transformers import AutoTokenizer

    # trust_remote_code: AutoTokenizer looks at config.json first, and would ask about the architecture's code
    # there.
    whole = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    alone = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    readers: dict[str, Callable[[str], list[int]]] = {
        "AutoTokenizer": lambda text: whole(text, verbose=False).input_ids,
        "tokenizer.json alone": lambda text: alone.encode(text).ids,
        "an import": load_tokenizer(folder).encode,
    }
    if whole.eos_token_id != tokenizer.end_of_document:
        raise UserError(
            f"tokenizer: the exported tokenizer ends documents with {whole.eos_token_id}, {tokenizer.name} "
            f"with {tokenizer.end_of_document}"
        )
    compared = 0
    for text in itertools.chain(AWKWARD_TEXTS, map(put_inside, user_defined_texts(tokenizer)), texts):
        expected = tokenizer.encode(text)
        for reader, encode in readers.items():
            if encode(text) != expected:
                raise UserError(
                    f"tokenizer: the exported tokenizer, read by {reader}, gives other ids than "
                    f"{tokenizer.name} for {text!r:.80}"
                )
        compared += len(expected)
    notes, specials = [], tokenizer.special_texts()
    probes = {text: (probe := put_inside(text), tokenizer.encode(probe)) for text in specials}
    compared += sum(len(ids) for _, ids in probes.values())
    for reader, encode in readers.items():
        if wrong := [text for text, (probe, ids) in probes.items() if encode(probe) != ids]:
            notes.append(
                f"read by {reader}, texts with {', '.join(map(repr, wrong))} get other ids than in training"
            )
        elif notes:
            notes[-1] += f"; {reader} gives those of training"
    return compared, notes
