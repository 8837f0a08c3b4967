"""Exports a run as a Hugging Face folder: written under a temporary name, compared, and only then renamed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from model.errors import UserError
from model.parameters import has_vocabulary_rows
from pretrain.data.sources.files import BuiltinCorpus
from pretrain.hf.comparison import MAX_LENGTH, WINDOWS, Comparison, compare, folder_logits, our_logits
from pretrain.hf.formats import Export, choose_format, plan_export
from pretrain.hf.model_card import model_card
from pretrain.hf.new_folder import new_folder
from pretrain.hf.safetensors_writer import SHARD_BYTES, total_bytes, write_weights
from pretrain.hf.tokenizer_files import check_tokenizer, write_tokenizer
from pretrain.run.saved import SavedRun
from pretrain.utils.heap import return_memory
from pretrain.utils.text import labelled

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CODE_FILES = ("configuration_head_schedule.py", "modeling_head_schedule.py")
_TOKENIZER_TEXTS = (
    "  two  spaces\n\n\ttabs\r\n",
    "▁ U+2581 ▁▁",
    "naïve 日本語 \N{GRINNING FACE}",
    " " * 33 + "x" + "\n" * 9,
)


@dataclass(frozen=True)
class Written:
    """The result of an export."""

    folder: Path
    export: Export
    comparison: Comparison
    bytes: int
    compared_text: str
    """Which text the logits were compared on."""
    compared_ids: int
    """How many token ids of both tokenizers were compared."""


def export_run(
    source: SavedRun,
    out: Path,
    *,
    format: str = "auto",
    dtype: str = "float32",
    overwrite: bool = False,
    license_name: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    report: Callable[[str], None] = print,
) -> Written:
    """Write *source* to the folder *out* in a Hugging Face format and compare its logits with our model's.

    Memory: one copy of the weights in fp32 (ours, then the written folder's), and about one tensor.

    Raises:
        UserError: the format cannot hold the model, *out* exists, no room on the disk, or the logits differ.
            *out* is then as it was before.
    """
    source.refuse_classifier("exported: the formats here are those of language models")
    chosen_format = choose_format(source.model, format)
    torch_dtype = DTYPES[dtype]
    token_ids = special_ids(source.tokenizer.end_of_document)
    export = plan_export(source.model, chosen_format, token_ids, torch_dtype)
    size = total_bytes(export.tensors, torch_dtype)
    with new_folder(out, size, overwrite) as partial:
        length = min(source.model.context_length, MAX_LENGTH)
        tokens, text = source.real_tokens(WINDOWS, length)
        report(labelled("reading", source.checkpoint.folder))
        network = source.load_model()
        reference = our_logits(network, tokens)
        report(labelled("writing", f"{export.config.architectures[0]}, {dtype}, {size / 1e6:,.1f} MB"))
        write_weights(
            partial, export.tensors, _weights_of(network, source.model.vocab_size), torch_dtype, shard_bytes
        )
        del network  # before the written folder is loaded: never two copies
        return_memory()
        write_description(partial, export, source.tokenizer.end_of_document)
        write_tokenizer(
            source.tokenizer, source.checkpoint.folder / "tokenizer", partial, source.model.context_length
        )
        compared_ids = check_tokenizer(partial, source.tokenizer, _texts())
        report(labelled("checking", f"{WINDOWS} x {length} tokens: {text}"))
        comparison = compare(reference, folder_logits(partial, tokens), torch_dtype)
        if comparison.problem:
            raise UserError(f"convert: {comparison.problem}; nothing was written to {out}")
        card = model_card(source, export, comparison, out.resolve().name, license_name)
        (partial / "README.md").write_text(card, encoding="utf-8")
    return Written(out, export, comparison, size, text, compared_ids)


def _weights_of(network: nn.Module, vocab_size: int) -> Callable[[str], Tensor]:
    parameters = dict(network.named_parameters())
    return lambda name: parameters[name].detach()[: vocab_size if has_vocabulary_rows(name) else None]


def special_ids(end_of_document: int) -> dict[str, int]:
    """The ids of special tokens as transformers' configurations name them: the end of a document is all of
    them."""
    return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end_of_document)


def write_description(folder: Path, export: Export, end_of_document: int) -> None:
    """Write config.json, generation_config.json and, for the native format, the architecture's code."""
    from transformers import GenerationConfig

    export.config.save_pretrained(folder)
    GenerationConfig(**special_ids(end_of_document)).save_pretrained(folder)
    if export.format == "native":
        for name in CODE_FILES:
            shutil.copyfile(Path(__file__).with_name(name), folder / name)


def _texts() -> Iterator[str]:
    """Texts on which the tokenizers are compared: awkward ones, and a few real documents."""
    yield from _TOKENIZER_TEXTS
    characters = 0
    for document in BuiltinCorpus().documents():
        yield document.text
        characters += len(document.text)
        if characters > 100_000:
            return
