"""The network, and nothing else: no data, no optimizer, no files.

    from model import Transformer, initialize, preset

Public names are imported when they are first used, since configurations need no torch.
"""

from typing import TYPE_CHECKING

from model.public import make_lazy_getattr

if TYPE_CHECKING:
    from model.config import ModelConfig
    from model.initialization import initialize
    from model.presets import preset, preset_names
    from model.sampling import generate
    from model.transformer import Transformer

__all__ = ["ModelConfig", "Transformer", "generate", "initialize", "preset", "preset_names"]
_PLACES = {
    "ModelConfig": "model.config",
    "Transformer": "model.transformer",
    "generate": "model.sampling",
    "initialize": "model.initialization",
    "preset": "model.presets",
    "preset_names": "model.presets",
}
__getattr__ = make_lazy_getattr(__name__, _PLACES)
