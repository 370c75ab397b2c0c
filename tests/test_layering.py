"""Rooms import only the rooms above them, through their front doors; modules form no cycles; light rooms stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "habitus"

# Top to bottom. A room sees what stands above it.
ROOMS = """errors display units progress machine interrupts files typed randomness recipe record store cards sizing laws
           events data softmax model evaluation training sweeps planning reporting studies serving exporting probing api
           cli""".split()
BLIND = {"planning", "reporting"}  # these read files; they see none of softmax..sweeps
HIDDEN = {"softmax", "model", "evaluation", "training", "sweeps"}
TORCH_FREE = """errors display units progress machine interrupts files typed randomness recipe record store cards sizing
                laws events data planning reporting studies cli""".split()


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


def bypasses(source: Path) -> list[str]:
    """Every import of a module inside another room, as 'file imports module': rooms are entered by their front door."""
    rows = []
    for path in sorted(source.rglob("*.py")):
        relative = path.relative_to(source)
        room = relative.parts[0].removesuffix(".py")
        for module in sorted(imported_modules(path)):
            parts = module.split(".")
            if len(parts) > 2 and parts[1] != room and (source / parts[1]).is_dir():
                rows.append(f"{relative} imports {module}")
    return rows


def imported_modules(path: Path) -> set[str]:
    """The modules of habitus that a file imports from, by their full names."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names if alias.name.startswith("habitus.")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("habitus."):
            modules.add(str(node.module))
            modules |= submodules(node, path)
    return modules


def submodules(node: ast.ImportFrom, importer: Path) -> set[str]:
    """The names of a from-import that are modules which the package's own `__init__` does not offer."""
    folder = path_of(str(node.module), importer)
    if folder is None:
        return set()
    init = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    offered = {a.asname or a.name for n in ast.walk(init) if isinstance(n, ast.ImportFrom) for a in n.names}
    names = {alias.name for alias in node.names if (folder / f"{alias.name}.py").exists()}
    return {f"{node.module}.{name}" for name in names - offered}


def path_of(module: str, importer: Path) -> Path | None:
    """The folder of a package of habitus, found from a file inside it."""
    root = next(parent for parent in importer.parents if parent.name == "habitus")
    folder = root.joinpath(*module.split(".")[1:])
    return folder if folder.is_dir() else None


def cycles(source: Path) -> list[set[str]]:
    """Groups of modules that import each other at their top level, directly or through others."""
    graph = {}
    for path in source.rglob("*.py"):
        if path.name == "__init__.py":
            continue
        name = ".".join(("habitus", *path.relative_to(source).with_suffix("").parts))
        graph[name] = {m for m in top_level_imports(path) if m != name}
    groups, reach = [], {name: reachable(name, graph) for name in graph}
    for name in sorted(graph):
        group = {other for other in reach[name] if name in reach.get(other, set())}
        if group and group not in groups:
            groups.append(group)
    return groups


def top_level_imports(path: Path) -> set[str]:
    """The modules of habitus that are imported when the file is."""
    modules = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("habitus."):
            modules.add(str(node.module))
            modules |= submodules(node, path)
    return modules


def reachable(name: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    stack = [name]
    while stack:
        for other in graph.get(stack.pop(), set()):
            if other not in seen:
                seen.add(other)
                stack.append(other)
    return seen


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


# Imports that may pass a front door, each with its reason.
ALLOWED_BYPASSES: dict[str, str] = {}


def test_rooms_are_entered_by_their_front_door() -> None:
    assert [row for row in bypasses(SOURCE) if row not in ALLOWED_BYPASSES] == []


def test_modules_form_no_cycles() -> None:
    assert cycles(SOURCE) == []


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


def test_the_checks_see_a_bypass_and_a_cycle(tmp_path: Path) -> None:
    tree = tmp_path / "habitus"
    for room in ("data", "model"):
        (tree / room).mkdir(parents=True)
        (tree / room / "__init__.py").write_text("")
    (tree / "data" / "log.py").write_text("from habitus.data.split import cut\n")
    (tree / "data" / "split.py").write_text("from habitus.data import log\n")
    (tree / "model" / "embedder.py").write_text("from habitus.data.log import read\nfrom habitus.data import split\n")
    assert bypasses(tree) == [
        "model/embedder.py imports habitus.data.log",
        "model/embedder.py imports habitus.data.split",
    ]
    assert cycles(tree) == [{"habitus.data.log", "habitus.data.split"}]


def test_the_torch_check_sees_torch(tmp_path: Path) -> None:
    tree = tmp_path / "probe"
    (tree / "laws").mkdir(parents=True)
    for folder in (tree, tree / "laws"):
        (folder / "__init__.py").write_text("")
    (tree / "laws" / "heavy.py").write_text("import torch\n")
    assert loads_torch(tree, "laws")
