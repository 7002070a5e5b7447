"""Lets an environment see the packages of the Python that runs this script.

usage: python overlay.py ENVIRONMENT

The packages come after the environment's own, and nothing is written into that Python: a torch that
is part of a machine image is used as it is. ``--system-site-packages`` would not do, since it means
the base Python where that Python is itself an environment.
"""

import sys
import sysconfig
from pathlib import Path


def main() -> int:
    """Write the environment's .pth file."""
    environment = Path(sys.argv[1]).resolve()
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path}
    packages = sorted(path for path in folders if path.endswith(("site-packages", "dist-packages")))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    target = environment / "lib" / version / "site-packages" / "torchmig_overlay.pth"
    target.write_text("".join(f"{path}\n" for path in packages), encoding="utf-8")
    try:
        import torch  # noqa: F401 - only whether it is there
    except ImportError:
        sys.exit(f"'{sys.executable}' has no torch; install it there or unset TORCHMIG_PYTHON")
    return 0


if __name__ == "__main__":
    sys.exit(main())
