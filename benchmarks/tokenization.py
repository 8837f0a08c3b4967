"""Tokenizing a corpus: ``head-schedules prepare`` next to a plain loop and to ``datasets.map``.

    python benchmarks/tokenization.py --tokenizer gpt2    # seven minutes; writes benchmarks/tokenization.md

measures throughput, and peak memory over a corpus ten times larger. The tokenizer may also be a folder. It
ends with status 1 if the command is slower than the faster of the two others, or takes much more memory for
more text.

All three read the same JSON Lines file (the built-in corpus, repeated) with the same tokenizer and write its
tokens to disk. Rounds are interleaved, since other work on a machine comes and goes; the table gives the best
round of each.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pretrain.data.tokenizer import Tokenizer, load_tokenizer  # noqa: E402
from pretrain.prepare.sources.plain_files import BuiltinCorpus  # noqa: E402
from pretrain.runtime.hardware import cpu_name  # noqa: E402


def write_corpus(path: Path, megabytes: float) -> int:
    """JSON Lines of about so much text: the built-in corpus, each copy marked so that no two documents are
    equal.

    Returns:
        Bytes of UTF-8 text.
    """
    size, copy = 0, 0
    with path.open("w", encoding="utf-8") as stream:
        while size < megabytes * 1e6:
            for document in BuiltinCorpus().documents():
                text = f"{copy} {document.text}"
                size += len(text.encode())
                stream.write(json.dumps({"text": text}) + "\n")
                if size >= megabytes * 1e6:
                    break
            copy += 1
    return size


def plain_loop(corpus: Path, tokenizer: Tokenizer, folder: Path, processes: int) -> int:
    """One document after the other, in this process."""
    tokens = 0
    with corpus.open(encoding="utf-8") as lines, (folder / "tokens.bin").open("wb") as out:
        for line in lines:
            ids = tokenizer.encode(json.loads(line)["text"])
            ids.append(tokenizer.end_of_document)
            out.write(np.array(ids, np.uint16).tobytes())
            tokens += len(ids)
    return tokens


def datasets_map(corpus: Path, tokenizer: Tokenizer, folder: Path, processes: int) -> int:
    """``datasets.map`` in batches; reading the file into Arrow first is part of it."""
    import datasets

    datasets.disable_progress_bars()
    dataset = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=str(folder))
    end = tokenizer.end_of_document

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"tokens": [[*ids, end] for ids in tokenizer.encode_batch(batch["text"])]}

    started = time.perf_counter()
    mapped = dataset.map(encode, batched=True, num_proc=processes, remove_columns=["text"])
    MAP_ALONE.append(time.perf_counter() - started)
    return sum(len(row) for batch in mapped.with_format("arrow").iter(1000) for row in batch["tokens"])


MAP_ALONE: list[float] = []


def prepare(corpus: Path, tokenizer: Tokenizer, folder: Path, processes: int) -> int:
    """The command, from its start to the finished folder."""
    tokenizer.save(folder / "tokenizer")
    command = prepare_command(corpus, folder, processes)
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    meta = json.loads((folder / "corpus" / "meta.json").read_text())
    return meta["training"]["tokens"] + meta["validation"]["tokens"]


def prepare_command(corpus: Path, folder: Path, processes: int) -> list[str]:
    """The command line that tokenizes *corpus* into ``folder/corpus``, with the tokenizer in
    ``folder/tokenizer``."""
    words = f"--text {corpus} --tokenizer {folder}/tokenizer --out {folder}/corpus --processes {processes}"
    return [sys.executable, "-m", "pretrain.prepare", *words.split()]


OURS = "pretrain.prepare"


def throughput(
    tokenizer: Tokenizer, megabytes: float, rounds: int, processes: int
) -> tuple[list[str], float]:
    """Lines of the table of throughputs, and how many times as fast as the fastest of the others the command
    is."""
    contestants: dict[str, Callable[[Path, Tokenizer, Path, int], int]] = {
        "plain loop, 1 process": plain_loop,
        f"datasets.map(num_proc={processes}), with loading": datasets_map,
        f"{OURS} --processes {processes}": prepare,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    busy: dict[str, list[float]] = {name: [] for name in contestants}
    tokens: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as root:
        corpus = Path(root, "corpus.jsonl")
        size = write_corpus(corpus, megabytes)
        for _ in range(rounds):
            for name, run in contestants.items():
                folder = Path(root, "round")
                folder.mkdir()
                started, cpu_started = time.perf_counter(), cpu_seconds()
                tokens[name] = run(corpus, tokenizer, folder, processes)
                seconds[name].append(time.perf_counter() - started)
                busy[name].append(cpu_seconds() - cpu_started)
                shutil.rmtree(folder)
    assert len(set(tokens.values())) == 1, f"not the same tokens: {tokens}"
    seconds[f"datasets.map(num_proc={processes}), the call alone"] = MAP_ALONE
    count = next(iter(tokens.values()))
    lines = [
        f"{size / 1e6:.1f} MB of text, {count:,} tokens, best of {rounds} rounds. Times are from the file to "
        "the finished output; the command's have starting Python and its workers in them.",
        "",
        "| | seconds (all rounds) | MB/s | processor seconds | MB per processor second |",
        "|---|---|---|---|---|",
    ]
    for name, values in seconds.items():
        listed = ", ".join(f"{value:.1f}" for value in values)
        cpu = min(busy[name]) if name in busy else None
        cells = f"{cpu:.1f} | {size / 1e6 / cpu:.2f}" if cpu else "|"
        lines.append(f"| {name} | {listed} | {size / 1e6 / min(values):.2f} | {cells} |")
    others = min(min(values) for name, values in seconds.items() if not name.startswith(OURS))
    ours = min(min(values) for name, values in seconds.items() if name.startswith(OURS))
    lines += ["", f"`{OURS}` is {others / ours:.2f} times as fast as the fastest of the others."]
    return lines, others / ours


def cpu_seconds() -> float:
    """Processor time of this process and of those it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def memory(tokenizer: Tokenizer, megabytes: float, processes: int) -> tuple[list[str], float]:
    """Lines of the table of memory for a corpus and for one ten times larger, and how much it grows."""
    lines = [
        "Memory of all processes together is the sum of their proportional set sizes, ten times a second.",
        "",
        "| text | median, all processes | peak, all processes | peak of the largest process (RSS) "
        "| median by quarter of the run |",
        "|---|---|---|---|---|",
    ]
    medians, largests = [], []
    for factor in (1, 10):
        with tempfile.TemporaryDirectory() as root:
            corpus = Path(root, "corpus.jsonl")
            size = write_corpus(corpus, megabytes * factor)
            tokenizer.save(Path(root, "tokenizer"))
            totals, largest = watch_memory(prepare_command(corpus, Path(root), processes))
        medians.append(statistics.median(totals))
        largests.append(largest)
        quarters = [totals[len(totals) * i // 4 : len(totals) * (i + 1) // 4] for i in range(4)]
        by_time = ", ".join(f"{statistics.median(quarter) / 2**20:.0f}" for quarter in quarters)
        cells = " | ".join(f"{n / 2**20:.0f} MiB" for n in (medians[-1], max(totals), largest))
        lines.append(f"| {size / 1e6:.0f} MB | {cells} | {by_time} MiB |")
    growth = [after / before for before, after in (medians, largests)]
    verdict = (
        f"Ten times the text takes {growth[0]:.2f} times the memory in the median, and {growth[1]:.2f} times "
        "in the largest process. (The peak of the sum is the highest of ten times as many samples: how many "
        "of the longest documents are tokenized at the same moment.)"
    )
    return [*lines, "", verdict], max(growth)


def watch_memory(command: list[str]) -> tuple[list[int], int]:
    """Run *command*; (sums of proportional set sizes, every 0.1 s; peak resident size of any process), in
    bytes.

    PSS counts a page that n processes share as 1/n of a page in each.
    """
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    totals: list[int] = []
    largest = 0
    main = psutil.Process(process.pid)
    while process.poll() is None:
        total = 0
        with contextlib.suppress(psutil.Error):  # one has just ended
            for one in [main, *main.children(recursive=True)]:
                info = one.memory_full_info()
                total += info.pss
                largest = max(largest, info.rss)
            totals.append(total)
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(process.returncode)
    return totals, largest


def report(arguments: argparse.Namespace, tokenizer: Tokenizer, tables: list[list[str]]) -> str:
    """The page: what was run, on what, and what came out."""
    command = (
        f"python benchmarks/tokenization.py --tokenizer {tokenizer.name} --megabytes {arguments.megabytes:g} "
        f"--rounds {arguments.rounds} --processes {arguments.processes}"
    )
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("tokenizers", "datasets"))
    machine = (
        f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores; Python {platform.python_version()}, {versions}"
    )
    parts = ["# Tokenizing a corpus", f"    {command}", machine, *("\n".join(lines) for lines in tables)]
    return "\n\n".join(parts) + "\n"


MOST_GROWTH = 1.15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", default="gpt2", help="hub name or folder")
    parser.add_argument("--megabytes", type=float, default=60, help="of text, and ten times more for memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "tokenization.md"), help="page to write")
    arguments = parser.parse_args()
    # Each contestant's processes are its parallelism; threads inside them would make a different comparison.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(arguments.tokenizer)
    speeds, faster = throughput(tokenizer, arguments.megabytes, arguments.rounds, arguments.processes)
    print("\n".join(speeds), flush=True)
    sizes, growth = memory(tokenizer, arguments.megabytes, arguments.processes)
    print("\n".join(sizes))
    Path(arguments.out).write_text(report(arguments, tokenizer, [speeds, sizes]), "utf-8")
    return 0 if faster >= 1 and growth <= MOST_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
