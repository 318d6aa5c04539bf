"""Tell a device that has failed from a step that has failed."""

import traceback

from pagoda.base.errors import PagodaError, WorkerDied
from pagoda.worker.devices import Device


def cause_of(error: Exception, device: Device) -> Exception:
    """Return WorkerDied if the device has failed, whatever `error` of the worker showed it first; otherwise `error`.

    A GPU reports its failure with whichever call comes next, often of a later step, and each library in its own words,
    while "out of memory" only concerns one step. So the device is asked. The error's traceback loses its variables:
    they would keep the memory of a step that needed too much.
    """
    shown: BaseException | None = error
    while shown is not None:
        traceback.clear_frames(shown.__traceback__)
        shown = shown.__cause__ or shown.__context__
    if isinstance(error, PagodaError):
        return error
    try:
        device.check()
    except WorkerDied as died:
        died.__cause__ = error
        return died
    return error
