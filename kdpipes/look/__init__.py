"""Look at chains: peek, text and HTML of a chain, figures, pictures of batches, profiles, and the doctor.

`show` draws chains, `figures` and `pictures` draw classes and images, `batch` shows delivered batches, `profile`
measures each pipe, and `doctor` examines chains by rules. To begin with, read `peek` and `doctor/examine`.
"""

from typing import TYPE_CHECKING

from kdpipes.core.on_use import exports

if TYPE_CHECKING:
    from kdpipes.look.batch import replay_grid
    from kdpipes.look.pictures import image_grid

__all__ = ["image_grid", "replay_grid"]

__getattr__ = exports(
    __name__,
    {
        "image_grid": "kdpipes.look.pictures",
        "replay_grid": "kdpipes.look.batch",
    },
)
