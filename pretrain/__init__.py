"""Everything around the network: configuration, data, training, checkpoints, commands.

What other programs use is here by name: ``from pretrain import recipe, train``; see pretrain/library.py.
"""

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model.errors import UserError
    from pretrain.checkpoint.state import Record, TrainingState
    from pretrain.config.run_config import RunConfig
    from pretrain.diagnostics.forward import prepare_measurement
    from pretrain.library import recipe, train
    from pretrain.metrics.file import read_metrics
    from pretrain.run.hooks import Hook, HookResult, IntervalHook
    from pretrain.run.saved import SavedRun
    from pretrain.run.session import Session
    from pretrain.runtime.signals import Stopped

__all__ = [
    "Hook",
    "HookResult",
    "IntervalHook",
    "Record",
    "RunConfig",
    "SavedRun",
    "Session",
    "Stopped",
    "TrainingState",
    "UserError",
    "prepare_measurement",
    "read_metrics",
    "recipe",
    "train",
]
_PLACES = {
    "UserError": "model.errors",
    "RunConfig": "pretrain.config.run_config",
    "recipe": "pretrain.library",
    "train": "pretrain.library",
    "read_metrics": "pretrain.metrics.file",
    "Hook": "pretrain.run.hooks",
    "HookResult": "pretrain.run.hooks",
    "IntervalHook": "pretrain.run.hooks",
    "Record": "pretrain.checkpoint.state",
    "TrainingState": "pretrain.checkpoint.state",
    "SavedRun": "pretrain.run.saved",
    "Session": "pretrain.run.session",
    "Stopped": "pretrain.runtime.signals",
    "prepare_measurement": "pretrain.diagnostics.forward",
}


def _find_own_files() -> None:
    """Keep files of the user from shadowing the package ``model`` next to this one, or a library.

    ``python -m`` puts the current folder first on the path: a model.py or yaml.py there would be imported.
    """
    root = Path(__file__).resolve().parents[1]
    # While it looks for a module to run, Python calls the program "-m". One of the user's keeps its path.
    following = pairwise([*sys.orig_argv, ""])
    module = next((flag[2:] or name for flag, name in following if flag.startswith("-m")), "")
    ours = sys.argv[:1] == ["-m"] and module.partition(".")[0] == "pretrain"
    if ours and not sys.flags.safe_path and Path(sys.path[0]).resolve() != root:
        del sys.path[0]
    init = root / "model" / "__init__.py"
    if "model" not in sys.modules:
        spec = importlib.util.spec_from_file_location("model", init)
        if spec is not None and spec.loader is not None:
            sys.modules["model"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules["model"])
    elif Path(found := getattr(sys.modules["model"], "__file__", None) or "").resolve() != init:
        raise ImportError(f"pretrain needs the name 'model', which is that of {found!r}; rename that one")


_find_own_files()

from model.public import make_lazy_getattr  # noqa: E402

__getattr__ = make_lazy_getattr(__name__, _PLACES)
