"""Loads torch in three quarters of the time, for jobs that are started often.

The collector goes through all that torch makes again and again while torch is loaded, and once more
at the end of the process, and finds nothing.
"""

import atexit
import gc

gc.disable()

import torch  # noqa: E402 - that is the point

gc.freeze()
gc.enable()
atexit.register(gc.freeze)

dist, nn = torch.distributed, torch.nn
DataLoader, Dataset = torch.utils.data.DataLoader, torch.utils.data.Dataset
