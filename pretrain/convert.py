"""Export a run to Hugging Face format and verify its logits: ``head-schedules convert runs/NAME --out DIR``.

Reads any checkpoint (ZeRO stage, data- and tensor-parallel size) on one machine without a GPU, writes
safetensors, configuration, tokenizer and model card, loads the folder afresh and compares its logits with our
model's. ``--from_hf DIR --out runs/NAME`` is the other direction: a run to continue pretraining from.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from model.declared import NonNegativeInt, declared
from model.errors import UserError
from pretrain.checkpoint.finder import require_steps
from pretrain.config.options import parse_options
from pretrain.hf.model_folder import check_folder
from pretrain.hf.new_folder import check_output
from pretrain.runtime.command import run_command
from pretrain.utils.files import output_folder


@declared()
class ConvertOptions:
    """The command line."""

    out: str
    """folder to write, such as hf/NAME (with --from_hf runs/NAME)"""
    run: str | None = None
    """a run's folder, such as runs/NAME"""
    from_hf: str | None = None
    """the other direction: make a run of this Llama, Qwen2, Qwen3, Mistral, SmolLM3, GPT-2 or native
    folder"""
    step: NonNegativeInt | None = None
    """which checkpoint (default: the newest valid one)"""
    format: Literal["auto", "native", "llama", "qwen3"] = "auto"
    """native writes this project's architecture with its code; llama and qwen3 write LlamaForCausalLM and
    Qwen3ForCausalLM, padded where layers differ; auto chooses transformers' Llama, Qwen2, Qwen3, Mistral,
    SmolLM3 or GPT-2 if the weights fit unchanged, else native"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of the weights: float32, bfloat16 or float16"""
    fold: bool = False
    """put the divisor of a model in mup into the weights of its final norm, for programs that do not read
    logit_scale"""
    license: str | None = None
    """name for the model card, such as apache-2.0 (default: none is named)"""
    overwrite: bool = False
    """replace an exported model at the folder to write, if nothing in it was added or changed"""


def run_convert(arguments: Sequence[str]) -> None:
    """Convert a run to a Hugging Face folder, or with ``--from_hf`` the other way.

    Raises:
        UserError: bad input, or an export that does not compute what the run's model computes.
    """
    description = "Export a run to Hugging Face format and verify its logits."
    options = parse_options(
        ConvertOptions, arguments, "head-schedules convert", description, positional=["run"]
    )
    if (options.from_hf is None) == (options.run is None):
        raise UserError("run: give the folder of a run, such as runs/NAME, or --from_hf DIR, and not both")
    for name in ("step", "format", "dtype", "fold", "license", "overwrite") if options.run is None else ():
        if getattr(options, name) != getattr(ConvertOptions, name):
            raise UserError(f"{name}: is for converting a run; leave it out with --from_hf")
    out = output_folder(options.out)
    if options.run is not None:
        require_steps(options.run, options.step)
        if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(Path(options.run, "checkpoints"))):
            raise UserError(f"out: {str(out)!r} is among the run's checkpoints; give one such as hf/NAME")
    elif options.from_hf is not None:
        check_folder(options.from_hf)
    kind = "run" if options.run is None else "model"
    check_output(out, options.overwrite, kind)
    # Imported here: these load torch and DeepSpeed, and a mistyped flag should be answered at once.
    from pretrain.engine.deepspeed_logging import quiet_libraries

    quiet_libraries()
    if options.from_hf is not None:
        from pretrain.hf.import_folder import import_folder

        import_folder(Path(options.from_hf), out)
    elif options.run is not None:
        from pretrain.hf.export_folder import export_run
        from pretrain.run.saved import SavedRun

        written = out, options.format, options.dtype, options.overwrite, options.license, options.fold
        export_run(SavedRun.open(options.run, options.step), *written)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is that of run_command."""
    return run_command(run_convert, arguments)


if __name__ == "__main__":
    sys.exit(main())
