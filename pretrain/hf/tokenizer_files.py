"""Writes a run's tokenizer as files that transformers' AutoTokenizer reads, with the same ids."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from model.errors import UserError
from pretrain.data.sentencepiece_bpe import byte_fallback_bpe
from pretrain.data.tokenizer import SentencePieceTokenizer, Tokenizer


def write_tokenizer(tokenizer: Tokenizer, out: Path, context_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; a SentencePiece model, of which tokenizer.json is a
    translation, too, for importing it again and for llama.cpp's converter.

    Raises:
        UserError: a SentencePiece model whose ids no tokenizer.json can give.
    """
    if isinstance(tokenizer, SentencePieceTokenizer):
        backend = byte_fallback_bpe(tokenizer)
        (out / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
        end = backend.id_to_token(tokenizer.end_of_document)
        tokenizer.save(out)
        # What llama.cpp would otherwise add to a text.
        more = {"unk_token": backend.model.unk_token, "add_bos_token": False, "add_prefix_space": False}
    else:
        tokenizer.save(out)
        config = json.loads((out / "tokenizer_config.json").read_text(encoding="utf-8"))
        end, more = config["eos_token"], {}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        # Documents end with this token and begin after it: it is what stands before a text.
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "name_or_path": tokenizer.name,
        **more,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def check_tokenizer(folder: Path, tokenizer: Tokenizer, texts: Iterable[str]) -> int:
    """Load the written tokenizer afresh and compare its ids with ours.

    Returns:
        How many tokens were compared.

    Raises:
        UserError: they differ.
    """
    from transformers import AutoTokenizer

    # trust_remote_code: AutoTokenizer looks at config.json first, and would ask about the architecture's code
    # there.
    exported_tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    compared = 0
    for text in texts:
        expected = [*tokenizer.encode(text), tokenizer.end_of_document]
        ids = exported_tokenizer.encode(text, add_special_tokens=False, verbose=False)
        if [*ids, exported_tokenizer.eos_token_id] != expected:
            raise UserError(
                f"tokenizer: the exported tokenizer gives other ids than {tokenizer.name} for {text!r:.80}"
            )
        compared += len(ids)
    return compared
