"""Describes this machine, for the record next to results: device, versions, whether it can compile.

python benchmarks/machine.py [--out FILE.json]
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import torch  # noqa: E402

from benchmarks.helpers import parser_of, run_main, write  # noqa: E402
from model.documents import HAS_VARLEN  # noqa: E402
from pretrain.engine.compiling import find_missing_compiler  # noqa: E402
from pretrain.runtime.hardware import describe_device, detect_device, supports_bf16  # noqa: E402

PACKAGES = ("torch", "triton", "deepspeed", "transformers", "sentencepiece", "pytest")


def version(name: str) -> str | None:
    """Of an installed package; None if it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Print the lines."""
    options = parser_of(__doc__).parse_args()
    os.environ.setdefault("LOCAL_RANK", "0")
    device = detect_device()
    results = {
        "device": describe_device(device),
        "devices": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "bf16": supports_bf16(device)[1],
        "compiling": find_missing_compiler(device) or "possible",
        "documents' kernel": HAS_VARLEN,
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }
    for name, value in results.items():
        print(f"{name}: {'not installed' if value is None and name in PACKAGES else value}")
    write(options.out, results)


if __name__ == "__main__":
    run_main(main)
