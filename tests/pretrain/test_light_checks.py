"""Bad input is answered before torch or DeepSpeed are imported, which takes seconds."""

import json
import os
import subprocess
import sys

from tests.helpers.launch import ROOT

PROGRAM = """
import json, sys
from model.errors import UserError
from pretrain.config.command_line import parse_command_line
from pretrain.engine.ds_config import check_against_run
from pretrain.engine.ds_config_check import read_ds_config
from pretrain.assembly.preflight import check_settings, check_start

def answer(arguments):
    try:
        command = parse_command_line(arguments)
        check_against_run(read_ds_config(command.ds_config), command.run)
        check_settings(command.run)
        check_start(command.run)
    except UserError as error:
        return str(error)

answers = [answer(arguments) for arguments in json.loads(sys.argv[1])]
print(json.dumps([answers, sorted({"torch", "deepspeed", "transformers"} & sys.modules.keys())]))
"""
ANSWERS = {
    "--data nope": "data: 'nope' is not a folder",
    "--validation.data nope": "validation.data: 'nope' is not a folder",
    "--ds_config nope": "ds_config: cannot read 'nope'",
    "--optimizer.learning_rate x": "optimizer.learning_rate: 'x' is not valid",
    "--heads 5x3": "heads: '5x3' is a schedule for 3 layers",
    "--model nope": "model: no preset 'nope'",
    "--steps 0": "steps: 0 is not valid",
    "--micro_batch 7": "micro_batch: 7 does not divide",
    "--global_batch_tokens 300": "global_batch_tokens: 300 is not a multiple",
    "--tensor_parallel 3": "tensor_parallel: 3 does not divide",
    "--tensor_parallel 2": "tensor_parallel: 2 does not divide the 1 rank",
    "--schedule.warmup 1e9": "schedule.warmup",
    "--compile true --ds_config zero3": "compile: true is not valid at ZeRO stage 3",
    "--threads 100000": "threads: 100000 is not valid",
    "--checkpoint.mirror nope://bucket": "checkpoint.mirror: ",
}


def test_neither_torch_nor_deepspeed_is_loaded():
    commands = [flags.split() for flags in [*ANSWERS, ""]]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "WORLD_SIZE"},
    )
    assert result.returncode == 0, result.stderr
    answers, loaded = json.loads(result.stdout)
    for answer, words in zip(answers, ANSWERS.values(), strict=False):
        assert answer and words in answer
    assert answers[-1] is None, "the default run is valid, and nothing of it needs torch"
    assert loaded == []
