"""Rooms import only the rooms above them, and the light ones never load torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "habitus"

# Top to bottom. A room sees what stands above it.
ROOMS = """errors units progress files typed randomness recipe record store sizing laws events data softmax model
           evaluation training sweeps planning reporting studies serving exporting cli""".split()
BLIND = {"planning", "reporting"}  # these read files; they see none of softmax..sweeps
HIDDEN = {"softmax", "model", "evaluation", "training", "sweeps"}
TORCH_FREE = """errors units progress files typed randomness recipe record store sizing laws events data planning
                reporting studies cli""".split()


def imported_rooms(path: Path) -> set[str]:
    """The rooms of habitus that a file imports, anywhere in it."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
            if node.module == "habitus":
                names = [f"habitus.{alias.name}" for alias in node.names]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("habitus.")}
    return rooms & set(ROOMS)


def violations(source: Path) -> list[str]:
    """Every import that points down, as 'file imports room'."""
    found = []
    for path in sorted(source.rglob("*.py")):
        relative = path.relative_to(source)
        room = relative.parts[0].removesuffix(".py")
        if room in ("__init__", "__main__"):
            continue
        if room not in ROOMS:
            found.append(f"{relative} stands in no known room")
            continue
        allowed = set(ROOMS[: ROOMS.index(room) + 1])
        if room in BLIND:
            allowed -= HIDDEN
        found += [f"{relative} imports {other}" for other in sorted(imported_rooms(path) - allowed)]
    return found


def loads_torch(source: Path, room: str) -> bool:
    """Whether importing every module of a room, in a fresh process, loads torch."""
    paths = [source / f"{room}.py"] if (source / f"{room}.py").exists() else sorted((source / room).rglob("*.py"))
    modules = [
        ".".join((source.name, *path.relative_to(source).with_suffix("").parts)).removesuffix(".__init__")
        for path in paths
    ]
    code = f"import sys; sys.path.insert(0, {str(source.parent)!r}); import " + ", ".join(modules)
    code += "; sys.exit(3 if 'torch' in sys.modules else 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode in (0, 3), result.stderr
    return result.returncode == 3


def test_rooms_import_only_the_rooms_above_them() -> None:
    assert violations(SOURCE) == []


@pytest.mark.parametrize("room", TORCH_FREE)
def test_light_rooms_import_without_torch(room: str) -> None:
    assert not loads_torch(SOURCE, room)


def test_the_check_sees_what_it_should(tmp_path: Path) -> None:
    tree = tmp_path / "habitus"
    for room in ("planning", "training", "model"):
        (tree / room).mkdir(parents=True)
        (tree / room / "__init__.py").write_text("")
    (tree / "__init__.py").write_text("")
    (tree / "planning" / "plan.py").write_text("from habitus.training import loop\n")
    (tree / "model" / "embedder.py").write_text("def f():\n    import habitus.training.loop\n")
    (tree / "training" / "loop.py").write_text("from habitus import model\n")
    (tree / "helpers.py").write_text("")
    assert violations(tree) == [
        "helpers.py stands in no known room",
        "model/embedder.py imports training",
        "planning/plan.py imports training",
    ]


def test_the_torch_check_sees_torch(tmp_path: Path) -> None:
    tree = tmp_path / "probe"
    (tree / "laws").mkdir(parents=True)
    for folder in (tree, tree / "laws"):
        (folder / "__init__.py").write_text("")
    (tree / "laws" / "heavy.py").write_text("import torch\n")
    assert loads_torch(tree, "laws")
