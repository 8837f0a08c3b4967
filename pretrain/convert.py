"""From a run to a Hugging Face folder, with proof: ``python -m pretrain.convert runs/NAME --out DIR``.

Reads any checkpoint (ZeRO stage, data- and tensor-parallel size) on one machine without a GPU, writes
safetensors, configuration, tokenizer and model card, loads the folder afresh and compares its logits with our
model's. ``--from_hf DIR --out runs/NAME`` is the way back: a run to continue pretraining from.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from model.declared import Count, declared
from model.errors import UserError, run_command
from pretrain.config.options import parse_options
from pretrain.utils.text import labelled


@declared()
class ConvertOptions:
    """The command line."""

    run: str | None = None
    """a run's folder, such as runs/NAME"""
    from_hf: str | None = None
    """the way back: make a run of this Llama, GPT-2 or native folder"""
    out: str | None = None
    """folder to write"""
    step: Count | None = None
    """which checkpoint (default: the newest valid one)"""
    format: Literal["auto", "native", "llama"] = "auto"
    """native: our architecture, shipped as remote code; llama: plain LlamaForCausalLM, zero-padded where
    layers differ; auto: plain Llama or GPT-2 for models that are one, else native"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """of the weights: float32, bfloat16 or float16"""
    license: str | None = None
    """name for the model card (default: apache-2.0; of an imported model none is named)"""
    overwrite: bool = False
    """replace an exported model at the folder to write"""


def run_convert(arguments: Sequence[str]) -> None:
    """Convert a run to a Hugging Face folder, or with ``--from_hf`` the other way.

    Raises:
        UserError: bad input, or an export that does not compute what the run's model computes.
    """
    description = "From a run to a Hugging Face folder, with proof."
    options = parse_options(
        ConvertOptions, arguments, "python -m pretrain.convert", description, positional=["run"]
    )
    if options.from_hf is None and options.run is None:
        raise UserError("run: missing; give the folder of a run, such as runs/NAME")
    if options.out is None:
        raise UserError("out: missing; give the folder to write, such as hf/NAME (with --from_hf runs/NAME)")
    if options.from_hf is not None and options.run is not None:
        raise UserError(f"run: {options.run!r} was given beside --from_hf; give one of them")
    # Imported here: these load torch and DeepSpeed, and a mistyped flag should be answered at once.
    from pretrain.engine.quiet import quiet_libraries

    quiet_libraries()
    if options.from_hf is not None:
        _from_hugging_face(options.from_hf, options.out)
    elif options.run is not None:
        _to_hugging_face(options.run, options.out, options)


def _to_hugging_face(run: str, out: str, options: ConvertOptions) -> None:
    from pretrain.hf.export_folder import export_run
    from pretrain.run.saved import SavedRun

    written = export_run(
        SavedRun.open(run, options.step),
        Path(out),
        format=options.format,
        dtype=options.dtype,
        overwrite=options.overwrite,
        license_name=options.license,
    )
    code = "needs trust_remote_code=True" if written.export.format == "native" else "no remote code"
    print(labelled("tokens", f"{written.compared_ids:,} ids of the exported tokenizer equal the run's"))
    print(labelled("logits", written.comparison))
    for note in written.export.notes:
        print(labelled("padding", note))
    print(labelled("ready", f"{written.folder}: {written.export.config.architectures[0]}; {code}"))


def _from_hugging_face(folder: str, out: str) -> None:
    from pretrain.hf.import_folder import import_folder

    imported = import_folder(Path(folder), Path(out))
    for note in imported.notes:
        print(labelled("note", note))
    print(labelled("logits", imported.comparison))
    print(labelled("ready", f"{imported.folder}: {imported.model.num_parameters():,} parameters, step 0"))
    prepare = f"python -m pretrain.prepare --text … --tokenizer {imported.folder}/tokenizer --out data/NAME"
    train = f"deepspeed pretrain/main.py --config {imported.folder}/config.yaml --data data/NAME"
    print(labelled("next", f"{prepare}\n{train}"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is that of run_command."""
    return run_command(run_convert, arguments)


if __name__ == "__main__":
    sys.exit(main())
