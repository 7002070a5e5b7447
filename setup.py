"""Builds the extension torchmig._C from csrc/*.cpp; everything else stands in pyproject.toml.

Neither a CUDA toolkit nor the headers of gloo or NCCL are needed, so that one build serves CPU and
CUDA machines. ``DEBUG=1`` builds without optimisation and with symbols, ``WERROR=1`` turns warnings
into errors.
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
CXX_20_SINCE = (2, 14)  # torch's own headers need C++20 from this release on


def check_build_tools() -> None:
    """Exit with one sentence where a tool is missing, instead of a page of build log."""
    compiler = os.environ.get("CXX", "c++").split()[0]  # as torch's build takes it
    if shutil.which(compiler) is None:
        sys.exit(
            f"cannot build torchmig: the C++ compiler '{compiler}' is not on PATH; "
            "install one (Debian, Ubuntu: apt-get install g++) or name it in CXX"
        )
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        sys.exit(
            f"cannot build torchmig: Python.h is not in '{sysconfig.get_path('include')}'; "
            "install this Python's development files (Debian, Ubuntu: apt-get install python3-dev)"
        )


def extension() -> tuple[list[Extension], dict[str, type]]:
    """Return the extension and the build command that torch provides for it."""
    # Absolute paths would end up in the wheel's records: sources are named from the root.
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.cpp"))
    if not sources:
        return [], {}
    check_build_tools()
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        sys.exit(
            f"cannot build torchmig: torch cannot be imported ({error}); install torch 2.11 or "
            "newer first, then build with pip's --no-build-isolation"
        )
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    standard = "c++20" if release >= CXX_20_SINCE else "c++17"
    flags = [f"-std={standard}", "-Wall", "-Wextra", "-fvisibility=hidden"]
    flags += ["-O0", "-g3"] if os.environ.get("DEBUG") == "1" else ["-O2", "-g1"]
    if os.environ.get("WERROR") == "1":
        flags.append("-Werror")
    print(
        f"torchmig: {len(sources)} C++ files, torch {torch.__version__}, {' '.join(flags)}",
        file=sys.stderr,
    )
    module = CppExtension(
        "torchmig._C",
        sources,
        include_dirs=[str(ROOT / "csrc")],
        # torch's own headers are not ours to warn about.
        extra_compile_args=[*flags, *(f"-isystem{path}" for path in torch_includes())],
        extra_link_args=["-ldl"],
        depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.h")),
    )
    return [module, preload(flags)], {"build_ext": BuildExtension.with_options(use_ninja=True)}


def preload(flags: list[str]) -> Extension:
    """Return the library that a rank preloads: plain C++, with its own copy of the C++ runtime.

    It is loaded before everything else, so it must not decide which libstdc++ the process gets.
    """
    exports = "csrc/preload/exports.map"
    names = ["arena", "arena_cuda", "arena_planner", "lazy_cuda"]
    return Extension(
        "torchmig._preload",
        sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc" / "preload").glob("*.cpp"))
        + [f"csrc/{name}.cpp" for name in names],
        language="c++",
        extra_compile_args=flags,
        extra_link_args=[
            "-static-libstdc++",
            "-static-libgcc",
            f"-Wl,--version-script={ROOT / exports}",
            "-ldl",
        ],
        depends=[
            exports,
            *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob("**/*.h")),
        ],
    )


def torch_includes() -> list[str]:
    """Return torch's include folders."""
    from torch.utils.cpp_extension import include_paths

    return list(include_paths())


modules, commands = extension()
setup(ext_modules=modules, cmdclass=commands)
