"""From a run to a Hugging Face folder, with proof: ``python -m pretrain.convert runs/NAME --out DIR``.

Reads any checkpoint (ZeRO stage, data- and tensor-parallel size) on one machine without a GPU, writes safetensors,
configuration, tokenizer and model card, loads the folder afresh and compares its logits with our model's.
``--from_hf DIR --out runs/NAME`` is the way back: a run to continue pretraining from.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from model.errors import UserError, run_command
from pretrain.config.command_line import CommandParser as Parser
from pretrain.utils.text import labelled

FORMATS = ("auto", "native", "llama")
DTYPE_NAMES = ("float32", "bfloat16", "float16")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = Parser(
        prog="python -m pretrain.convert", description=__doc__.split("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run's folder, such as runs/NAME")
    parser.add_argument(
        "--from_hf", metavar="DIR", help="the way back: make a run of this Llama, GPT-2 or native folder"
    )
    parser.add_argument("--out", metavar="DIR", help="folder to write")
    parser.add_argument(
        "--step", type=int, metavar="N", help="which checkpoint (default: the newest valid one)"
    )
    parser.add_argument(
        "--format",
        default="auto",
        help="native: our architecture, shipped as remote code; llama: plain LlamaForCausalLM, zero-padded where "
        "layers differ; auto (default): plain Llama or GPT-2 for models that are one, else native",
    )
    parser.add_argument("--dtype", default="float32", help=f"of the weights: {', '.join(DTYPE_NAMES)}")
    parser.add_argument(
        "--license",
        metavar="NAME",
        help="for the model card (default: apache-2.0; of an imported model none is named)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an exported model at DIR")
    return parser


def run_convert(arguments: Sequence[str]) -> None:
    """Convert a run to a Hugging Face folder, or with ``--from_hf`` the other way.

    Raises:
        UserError: bad input, or an export that does not compute what the run's model computes.
    """
    options = build_parser().parse_args(arguments)
    if options.from_hf is None and options.run is None:
        raise UserError("run: missing; give the folder of a run, such as runs/NAME")
    if options.from_hf is not None and options.run is not None:
        raise UserError(f"run: {options.run!r} was given beside --from_hf; give one of them")
    if options.out is None:
        raise UserError("out: missing; give the folder to write, such as hf/NAME (with --from_hf runs/NAME)")
    for field, valid in (("format", FORMATS), ("dtype", DTYPE_NAMES)):
        if (value := getattr(options, field)) not in valid:
            raise UserError(f"{field}: {value!r} is not valid; give one of {', '.join(valid)}")
    # Imported here: these load torch and DeepSpeed, and a mistyped flag should be answered at once.
    from pretrain.engine.quiet import quiet_libraries

    quiet_libraries()
    (_to_hugging_face if options.from_hf is None else _from_hugging_face)(options)


def _to_hugging_face(options: argparse.Namespace) -> None:
    from pretrain.hf.export_folder import export_run
    from pretrain.run.saved import with_saved_run

    written = with_saved_run(
        options.run,
        options.step,
        lambda source: export_run(
            source,
            Path(options.out),
            format=options.format,
            dtype=options.dtype,
            overwrite=options.overwrite,
            license_name=options.license,
        ),
    )
    code = "needs trust_remote_code=True" if written.export.format == "native" else "no remote code"
    print(labelled("tokens", f"{written.compared_ids:,} ids of the exported tokenizer equal the run's"))
    print(labelled("logits", written.comparison))
    for note in written.export.notes:
        print(labelled("padding", note))
    print(labelled("ready", f"{written.folder}: {written.export.config.architectures[0]}; {code}"))


def _from_hugging_face(options: argparse.Namespace) -> None:
    from pretrain.hf.import_folder import import_folder

    imported = import_folder(Path(options.from_hf), Path(options.out))
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
