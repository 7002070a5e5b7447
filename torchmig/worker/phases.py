"""What the agent asks a parked rank to do.

Each function is called on a native thread made for it, with the GIL held. It takes one JSON text
and returns one.
"""

import base64
import json
import os
import sys
import threading
import traceback

from torchmig import _C
from torchmig.worker import backends, communication, device


def describe(_request: str) -> str:
    """Say what this rank uses that cannot be restored, and which sockets are torch's."""
    return json.dumps(
        {
            "refused": backends.refused() + communication.refused() + device.refused(),
            "sockets": _C.torch_socket_inodes() + device.nccl_sockets(),
            "waits_on_gpus": communication.waits_on_gpus(),
        }
    )


def moves(_request: str) -> str:
    """Say what has moved in torch's communication since the last call, or nothing."""
    return json.dumps(_C.what_moves())


def store_keys(_request: str) -> str:
    """Return the script's keys in the store, values in base64."""
    keys = communication.store_keys()
    return json.dumps({key: base64.b64encode(value).decode() for key, value in keys.items()})


def groups(_request: str) -> str:
    """Return the process groups that this rank has: name, first member, number of members."""
    return json.dumps(communication.groups())


def mute(_request: str) -> str:
    """Let communication hear of no peer's end: all of it is about to be taken down."""
    communication.mute()
    return "null"


def take_down(request: str) -> str:
    """Take communication down, and give freed memory back so that it is not dumped.

    The request names the groups that are not built anew, each with its first member.
    """
    neutralised = communication.take_down({(name, first) for name, first in json.loads(request)})
    _C.trim_heap()
    return json.dumps({"neutralised": neutralised})


def nccl_sockets(_request: str) -> str:
    """Return the inodes of NCCL's sockets that are open."""
    return json.dumps(device.nccl_sockets())


def build_up(request: str) -> str:
    """Build communication anew at the place that the request names."""
    where = json.loads(request)
    # A script that initialises again later must find the job where it is now.
    if "MASTER_ADDR" in os.environ:
        os.environ["MASTER_ADDR"] = where["host"]
        os.environ["MASTER_PORT"] = str(where["port"])
    communication.build_up(
        communication.Place(where["host"], where["port"], where["prefix"], where["generation"]),
        where["timeout_seconds"],
    )
    return "null"


def stack(_request: str) -> str:
    """Return the Python stack of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return json.dumps("".join(traceback.format_stack(frame)) if frame is not None else "")


def device_describe(_request: str) -> str:
    """Say which GPUs this rank uses and sees."""
    return json.dumps({**device.describe(), "waits_on_gpus": communication.waits_on_gpus()})


def device_live(_request: str) -> str:
    """Return the GPU memory that has to be kept."""
    device.settle()
    device.end_compile_workers()
    return json.dumps(device.live_blocks())


def device_copy(request: str) -> str:
    """Copy GPU memory to staging or back."""
    wanted = json.loads(request)
    device.copy(wanted["out"], wanted["staging"], wanted["pieces"])
    return "null"


def device_release(_request: str) -> str:
    """Give GPU memory back and close what the driver would not save."""
    released = device.release()
    device.close_nvml()
    return json.dumps(released)


def device_regain(_request: str) -> str:
    """Undo `device_release`; contents come by `device_copy`."""
    device.reopen_nvml()
    device.regain()
    return "null"
