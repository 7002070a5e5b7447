"""What a checkpoint could not keep is noticed where it is made on a GPU, and made all the same.

The CUDA runtime and CUPTI here are libraries of their names that check what they are given; that a
rank is refused by name is tested on GPUs.
"""

import json
import os
import subprocess
import sys

from c_library import build

from torchmig.capture.device import environment

RUNTIME = """
#include <stddef.h>
#include <string.h>

typedef struct { char bytes[64]; } Handle;

int cudaMallocManaged(void** out, size_t size, unsigned flags) {
    *out = (void*)0x1000;
    return size == 7 && flags == 1 ? 0 : 77;
}
int cudaMallocAsync(void** out, size_t size, void* stream) {
    *out = (void*)0x1000;
    return size == 8 && stream == (void*)9 ? 0 : 77;
}
int cudaIpcGetMemHandle(void* handle, void* address) {
    memset(handle, 5, sizeof(Handle));
    return address == (void*)0x1000 ? 0 : 77;
}
int cudaIpcOpenMemHandle(void** out, Handle handle, unsigned flags) {
    *out = (void*)0x2000;
    return handle.bytes[0] == 5 && handle.bytes[63] == 5 && flags == 1 ? 0 : 77;
}
int cudaIpcCloseMemHandle(void* address) {
    return address == (void*)0x2000 ? 0 : 77;
}
"""

CUPTI = """
int cuptiSubscribe(void** subscriber, void* callback, void* data) {
    *subscriber = (void*)0x3000;
    return callback == (void*)5 && data == (void*)6 ? 0 : 77;
}
"""

PROGRAM = """
#include <stddef.h>

typedef struct { char bytes[64]; } Handle;
int cudaMallocManaged(void**, size_t, unsigned);
int cudaMallocAsync(void**, size_t, void*);
int cudaIpcGetMemHandle(void*, void*);
int cudaIpcOpenMemHandle(void**, Handle, unsigned);
int cudaIpcCloseMemHandle(void*);
int cuptiSubscribe(void**, void*, void*);

static void* memory;
static Handle handle;

int managed(void) { return cudaMallocManaged(&memory, 7, 1); }
int async(void) { return cudaMallocAsync(&memory, 8, (void*)9); }
int share(void) { return cudaIpcGetMemHandle(&handle, memory); }
int import(void) { return cudaIpcOpenMemHandle(&memory, handle, 1); }
int import_wrongly(void) { return cudaIpcOpenMemHandle(&memory, handle, 2); }
int close_import(void) { return cudaIpcCloseMemHandle(memory); }
int profile(void) {
    void* subscriber = 0;
    int result = cuptiSubscribe(&subscriber, (void*)5, (void*)6);
    return result == 0 && subscriber != (void*)0x3000 ? 78 : result;
}
"""

SCRIPT = """
import ctypes, json, sys
import torch
from torchmig import _C

program = ctypes.CDLL(sys.argv[1])
found = []
for name in sys.argv[2:]:
    result = getattr(program, name)()
    found.append([result, {what: count for what, count in _C.arena_seen().items() if count}])
print(json.dumps(found))
"""


def run(folder, *names, **variables):
    """Return (result, what has been seen so far) after each of these functions."""
    behind = (
        build(folder / "libcudart.so.13", RUNTIME),
        build(folder / "libcupti.so.13", CUPTI),
    )
    program = build(folder / "libprogram.so", PROGRAM, *behind, f"-Wl,-rpath,{folder}")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, program, *names],
        env={**os.environ, "LD_PRELOAD": str(environment.preload_library()), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_managed_and_stream_ordered_memory(tmp_path):
    assert run(tmp_path, "managed", "async", "managed") == [
        [0, {"managed_memory": 1}],
        [0, {"managed_memory": 1, "async_allocator": 1}],
        [0, {"managed_memory": 2, "async_allocator": 1}],
    ]


def test_shared_memory(tmp_path):
    """What another process has shared is none any more when it has been closed."""
    shared = {"managed_memory": 1, "ipc_export": 1}
    names = ("managed", "share", "import", "close_import", "import_wrongly")
    assert run(tmp_path, *names)[1:] == [
        [0, shared],
        [0, {**shared, "ipc_import": 1}],
        [0, shared],
        [77, shared],
    ]


def test_profilers(tmp_path):
    assert run(tmp_path, "profile") == [[0, {"cupti": 1}]]


def test_cupti_kept_from_profilers(tmp_path):
    """They are told that it is not supported, and nothing has been used."""
    assert run(tmp_path, "profile", TORCHMIG_NO_CUPTI="1") == [[27, {}]]
    assert run(tmp_path, "profile", TORCHMIG_NO_CUPTI="0") == [[0, {"cupti": 1}]]
