"""What the libraries print about themselves does not belong in a command's output."""

from __future__ import annotations

import os


def quiet_libraries() -> None:
    """No progress bars and no advice from DeepSpeed and transformers; errors still appear.

    Call before either is imported. DeepSpeed only reads checkpoints here, so it need not look for a GPU.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import transformers

    from pretrain.engine.build import quiet_deepspeed

    quiet_deepspeed()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
