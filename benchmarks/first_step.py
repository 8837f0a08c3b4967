"""What must be read to follow a run to its first step: files imported, functions run, circles of imports.

    python benchmarks/first_step.py                  # of this checkout
    python benchmarks/first_step.py --root ../other  # of another, such as a worktree of an earlier commit

The default run, uncompiled, in one process, with its data prepared; only the files of model/ and pretrain/
count. Functions are those that Python has called until the first optimizer step is done, threads included.
Circles are groups of modules that import each other, also inside functions and for type checkers.
"""

from __future__ import annotations

import argparse
import collections
import os
import subprocess
import sys
import tempfile
import threading
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FLAGS = "--compile false --logging.wandb disabled --vocab_size 512 --steps 2 --name first"


class FirstStep(BaseException):
    """The first step is done."""


def follow(root: Path, data: str, runs: str) -> tuple[set[str], set[tuple[str, str]]]:
    """Run to the first step in this process: the files imported, and each function run with its file."""
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    sys.argv = ["pretrain/main.py", *FLAGS.split(), "--runs_dir", runs, "--data_root", data]
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        from pretrain import main
        from pretrain.runtime.command import prepare_process
        from pretrain.runtime.signals import StopListener

        prepare_process()
        import pretrain.trainer as trainer

        counted = trainer.Trainer._count

        def count(self: Any, *given: Any, **named: Any) -> None:
            counted(self, *given, **named)
            raise FirstStep

        trainer.Trainer._count = count  # type: ignore[method-assign]
        main.main(sys.argv[1:], StopListener(), 0)
    except FirstStep:
        pass
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    ours = (f"{root}/model/", f"{root}/pretrain/")
    files = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
    # Without the bodies of classes, whose code has no fast locals.
    own = [code for code in codes if code.co_filename.startswith(ours) and code.co_flags & CO_OPTIMIZED]
    functions = {(code.co_filename, code.co_qualname) for code in own}
    named = {(file, name) for file, name in functions if "<" not in name.split(".")[-1]}  # no comprehensions
    return {file for file in files if file.startswith(ours)}, named


def circles(root: Path) -> list[list[str]]:
    """Groups of modules that import each other; imports for type checkers alone are not followed."""
    import grimp

    sys.path.insert(0, str(root))
    graph = grimp.build_graph("pretrain", "model", cache_dir=None, exclude_type_checking_imports=True)
    reach: dict[str, set[str]] = {}
    for module in graph.modules:
        reach[module] = graph.find_upstream_modules(module)
    groups: dict[str, set[str]] = collections.defaultdict(set)
    for module, found in reach.items():
        mutual = {other for other in found if module in reach[other]}
        if mutual:
            groups[min(mutual | {module})] |= mutual | {module}
    return [sorted(group) for group in groups.values()]


def main() -> None:
    """Print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    root = parser.parse_args().root.resolve()
    sys.path[0] = str(root)
    os.chdir(root)
    found = circles(root)
    with tempfile.TemporaryDirectory() as folder:
        data, runs = f"{folder}/data", f"{folder}/runs"
        before = [
            sys.executable,
            "pretrain/main.py",
            *FLAGS.split(),
            "--data_root",
            data,
            "--runs_dir",
            folder,
        ]
        subprocess.run(before, check=True, capture_output=True)  # makes the built-in corpus
        files, functions = follow(root, data, runs)
    print(f"files imported      {len(files)}")
    print(f"functions run       {len(functions)} in {len({file for file, _ in functions})} files")
    print(
        f"circles of imports  {len(found)}"
        + "".join(f"\n  {len(group)}: {' '.join(group)}" for group in found)
    )
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
