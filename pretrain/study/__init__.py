"""Studies: variants of a recipe over seeds, and what they show together.

``file`` declares the study file, ``planning`` plans its runs, ``running`` trains them, ``results`` reads what
they left, ``power`` plans how many are needed, and ``report`` shows the results. A run does not depend on its
study: its folder is an ordinary one, and no code that trains imports this package.
"""

from typing import TYPE_CHECKING

from model.public import make_lazy_getattr

if TYPE_CHECKING:
    from pretrain.study.notebook import Study

__all__ = ["Study"]
__getattr__ = make_lazy_getattr(__name__, {"Study": "pretrain.study.notebook"})
