"""Checks that imports point one way, as docs/design.md section 10 draws them.

usage: python check_layers.py [ROOT]

Imports inside functions count as well: a layer that reaches up late still reaches up. Ruff cannot
say this, since its lists of banned modules hold for the whole tree.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "torchmig"


@dataclass(frozen=True)
class Layer:
    """What the modules below one folder, or one module, may import.

    Attributes:
        own: Modules of the package that it may import besides itself.
        others: Packages from outside, besides the standard library, that it may import.
    """

    own: tuple[str, ...]
    others: tuple[str, ...] = ()


BASE = (
    *("errors", "exit_codes", "units", "config", "console", "criu", "host", "progress"),
    *("together", "gpu_settings"),
)
LAYERS: dict[str, Layer] = {
    "__init__": Layer(()),
    "__main__": Layer(("commands",)),
    "errors": Layer(()),
    "exit_codes": Layer(("errors",)),
    "units": Layer(("errors",)),
    "config": Layer(("errors", "units")),
    "console": Layer(("errors", "units")),
    "progress": Layer(("units",), ("rich",)),
    "together": Layer(()),
    "criu": Layer(("errors", "units")),
    "gpu_settings": Layer(()),
    "host": Layer(("errors", "units", "criu", "gpu_settings"), ("pynvml",)),
    "cut": Layer(("errors",)),
    "worker": Layer(("errors", "_C"), ("torch",)),
    "store": Layer(("errors", "units"), ("minio", "urllib3")),
    "repo": Layer(("errors", "units", "store"), ("blake3", "msgpack", "numpy", "zstandard")),
    "capture": Layer(
        (*BASE, "_C", "store", "repo"),
        ("blake3", "google", "msgpack", "pycriu", "pynvml", "torch", "zstandard"),
    ),
    "agent": Layer(
        (*BASE, "_C", "store", "repo", "capture", "cut", "worker"),
        ("msgpack", "pynvml", "rich", "torch"),
    ),
    "commands": Layer(
        (*BASE, "_C", "store", "repo", "capture", "cut", "agent", "worker", "exit_codes"),
        ("msgpack", "pynvml", "rich", "torch"),
    ),
}


def main() -> int:
    """Print every import that points the wrong way; return 1 if there is one."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]) / PACKAGE
    faults = [fault for path in sorted(root.rglob("*.py")) for fault in check_file(path, root)]
    for fault in faults:
        print(fault)
    return 1 if faults else 0


def check_file(path: Path, root: Path) -> Iterator[str]:
    """Yield a line for each import of one file that its layer does not allow."""
    relative = path.relative_to(root)
    name = relative.parts[0].removesuffix(".py")
    layer = LAYERS.get(name)
    if layer is None:
        yield f"{path}:1: '{name}' is in no layer; give it one in tools/check_layers.py"
        return
    for line, module in imports(ast.parse(path.read_text(encoding="utf-8")), relative):
        top, _, rest = module.partition(".")
        if top == PACKAGE:
            target = rest.split(".")[0]
            if target not in ("", name, *layer.own):
                yield f"{path}:{line}: '{name}' must not import '{PACKAGE}.{target}'"
        elif top not in sys.stdlib_module_names and top not in layer.others:
            yield f"{path}:{line}: '{name}' must not import '{top}'"


def imports(tree: ast.AST, relative: Path) -> Iterator[tuple[int, str]]:
    """Yield line and full module name of every import in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                around = (PACKAGE, *relative.parts[:-1])
                base = ".".join([*around[: len(around) - node.level + 1], *filter(None, [base])])
            if base == PACKAGE:
                for alias in node.names:
                    # A name of the package itself, such as __version__, is no module.
                    yield (
                        node.lineno,
                        f"{PACKAGE}.{alias.name}" if alias.name != "__version__" else base,
                    )
            else:
                yield node.lineno, base


if __name__ == "__main__":
    sys.exit(main())
