"""One conversion in a fresh process that measures its own memory; started by benchmarks/conversion_memory.py.

    python benchmarks/conversion_session.py RUN OUT [--format llama]

Prints one JSON object as its last line. Bytes, as growth over what the process had after its imports:

- ``own``: the most private memory at once (RssAnon). Files that are mapped while they are read are not in
  it: the system takes their pages back when it needs them;
- ``resident``: the most of everything at once (VmRSS), mapped files included.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from benchmarks.helpers import process_memory  # noqa: E402

FIELDS = {"own": "RssAnon", "resident": "VmRSS"}


def memory() -> dict[str, int]:
    """This process's memory by the names above, in bytes."""
    return {name: process_memory(field) for name, field in FIELDS.items()}


def main(arguments: list[str]) -> int:
    """Convert and print the peaks; the command's exit code."""
    from pretrain.engine.deepspeed_logging import quiet_libraries

    quiet_libraries()
    import torch
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401 - what from_pretrained would import half-way

    import pretrain.hf.export_folder
    import pretrain.hf.modeling_head_schedule
    import pretrain.run.saved  # noqa: F401
    from pretrain import convert

    torch.set_num_threads(1)
    before = memory()
    peak = dict(before)
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for name, value in memory().items():
                peak[name] = max(peak[name], value)
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    code = convert.main([arguments[0], "--out", *arguments[1:]])
    done.set()
    thread.join()
    print(json.dumps({name: peak[name] - before[name] for name in FIELDS}))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
