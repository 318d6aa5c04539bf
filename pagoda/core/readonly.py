"""readonly: how an owner shows its columns to readers."""

import numpy as np


def readonly(column: np.ndarray) -> np.ndarray:
    """Return a view of `column` that follows its content and cannot be written through."""
    view = column.view()
    view.flags.writeable = False
    return view
