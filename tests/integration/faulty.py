"""What tests break under a running job: its disks, and CRIU."""

import subprocess
import sys
from contextlib import contextmanager


@contextmanager
def mounted(folder, options):
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def remount(folder, options):
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def python_program(path, script):
    """Return a program that is a script of Python, whatever its name."""
    return executable(path, f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')


def mortal_criu(folder, criu, after):
    """Return a criu of the same release that is killed in a dump when the file `after` says.

    The file holds seconds; while it is empty or missing nothing is killed.
    """
    return _criu_of(
        folder,
        criu,
        f'[ "$1" = swrk ] && [ -s {after} ] || exec {criu.path} "$@"\n'
        f'exec timeout --foreground -s KILL "$(cat {after})" {criu.path} "$@"\n',
    )


def orphaning_criu(folder, criu, seconds):
    """Return a criu of the same release that is killed in a dump and leaves a child, a sleep."""
    return _criu_of(
        folder,
        criu,
        f'[ "$1" = swrk ] || exec {criu.path} "$@"\nsleep {seconds} &\nkill -s KILL $$\n',
    )


def _criu_of(folder, criu, script):
    packages = folder / "lib/python3/dist-packages"
    packages.parent.mkdir(parents=True)
    packages.symlink_to(criu.pycriu_folder.parent)
    return executable(folder / "sbin/criu", f"#!/bin/sh\n{script}")
