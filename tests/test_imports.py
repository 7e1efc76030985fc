"""The order in which a reader meets the modules: an import never points further down it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import aioload

PACKAGE = Path(aioload.__file__).parent

ORDER = [
    *("errors", "types", "arguments", "stats", "context", "randomness", "workers", "samplers", "cache", "readers"),
    *(
        "datasets",
        "leaf",
        "structure",
        "layout",
        "diagnosis",
        "collate",
        "pinned",
        "slot",
        "outliving",
        "ring",
        "bundle",
        "device",
        "copier",
        "engine",
    ),
    *("iterators", "loader", "testing", "__init__"),
]


def imported(path: Path) -> Iterator[str]:
    """Yield the dotted names of the package's own modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("aioload"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("aioload"))


def room(dotted: str) -> str:
    """Return the module or folder of the package that a dotted name lies in."""
    parts = dotted.split(".")[1:]
    return parts[0] if parts and parts[0] in ORDER else "__init__"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_import_points_down_the_order(path: Path) -> None:
    here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    rank = ORDER.index(here)
    down = [name for name in imported(path) if ORDER.index(room(name)) > rank]
    assert not down, f"{here} imports {down}, which come after it"


def test_the_readme_shows_every_module() -> None:
    readme = (PACKAGE.parent / "README.md").read_text()
    missing = [name for name in ORDER if name != "__init__" and name not in readme]
    assert not missing


def test_importing_starts_nothing() -> None:
    script = "import threading, aioload; assert threading.active_count() == 1, threading.enumerate()"
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=120)
