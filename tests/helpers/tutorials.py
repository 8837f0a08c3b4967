"""Runs the commands of a tutorial as a reader types them, with the command of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_commands(script: str, folder: Path, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a shell script in *folder* until its first command that fails; ``head-schedules`` is found.

    Args:
        variables: added to the environment of this process.
    """
    program = folder / "bin/head-schedules"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable} -P\nimport sys\nfrom pretrain.cli import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    path = f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=os.environ | variables | {"PATH": path, "WANDB_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=900,
    )
