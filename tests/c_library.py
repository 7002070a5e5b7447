"""Builds the C libraries that stand in for others, or look on."""

import subprocess


def build(path, text, *options):
    """Make a shared library of this source at `path`, with what else it is linked to."""
    source = path.with_name(f"{path.name}.c")
    source.write_text(text)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", path, source, *options], check=True)
    return path
