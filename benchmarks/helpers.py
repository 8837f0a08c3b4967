"""What benchmarks share: their parser and results, ranks without a launcher, memory and time of this
process."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pretrain.runtime.command import run_command
from pretrain.utils.files import write_atomically

if TYPE_CHECKING:
    from pretrain.config.command_line import CommandLine

ROOT = Path(__file__).resolve().parents[1]
MAIN_FLAGS = "Flags of a training may follow (head-schedules train --help)."
"""Under the help of benchmarks that hand on what they do not know."""


def parser_of(
    description: str | None,
    epilog: str | None = None,
    kind: type[argparse.ArgumentParser] = argparse.ArgumentParser,
) -> argparse.ArgumentParser:
    """A parser with the flag --out; the program's docstring is its help."""
    parser = kind(
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", metavar="FILE.json", help="write all results as JSON, too")
    return parser


def run_main(main: Callable[[], None]) -> NoReturn:
    """Run a benchmark's *main* and end the process; bad input gives a one-line error, as in the commands."""
    sys.exit(run_command(lambda _: main(), None))


def command_line_of(*flags: str) -> CommandLine:
    """The command line of pretrain/main.py with *flags*. Without a recipe among them, that of AdamW, which
    the measurements so far were made with."""
    # Some programs measure the memory of what they import.
    from pretrain.config.command_line import parse_command_line

    named = any(flag.split("=")[0] == "--config" for flag in flags)
    return parse_command_line([*([] if named else ["--config", "micro"]), *flags])


def write(out: str | None, results: Any) -> None:
    """Write *results* to *out*, if one was given; whole or not at all, since a benchmark may be cut off."""
    if out is None:
        return
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(results, indent=1) + "\n")


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)


def rank_variables(ranks: int) -> list[dict[str, str]]:
    """What a launcher would tell each of *ranks* processes of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(ranks)]


def run_ranks(
    arguments: list[str], ranks: int, variables: Mapping[str, str] | None = None, timeout: float | None = None
) -> list[str]:
    """Run a Python program on *ranks* processes; what each printed, in rank order.

    Raises:
        RuntimeError: a rank failed; its last lines are in the message.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=os.environ | rank | dict(variables or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in rank_variables(ranks)
    ]
    outputs = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=timeout)
            if process.returncode:
                raise RuntimeError(f"{' '.join(arguments)}: {errors[-2000:]}")
            outputs.append(output)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    return outputs


def process_memory(field: str) -> int:
    """A value of /proc/self/status in bytes: VmRSS (resident), VmHWM (its peak), RssAnon (without mapped
    files)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def wait() -> None:
    """Wait until a GPU has done what it was given."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], repeats: int = 1) -> float:
    """Wall-clock seconds of one of *repeats* calls, the device's work included."""
    wait()
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    wait()
    return (time.perf_counter() - began) / repeats
