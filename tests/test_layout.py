"""The layout rules of the design: small folders and files, one import direction, no circle, one front door."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import evenroute

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("eplb", "routing", "dist", "tools")  # each may import itself and those before it
FOLDER_FILES = range(2, 16)
FILE_LINES = 350


def sources(package: str) -> list[Path]:
    """All source files of a package, those of its sub-packages too."""
    found = sorted((ROOT / package).rglob("*.py"))
    assert len(found) > 30, f"only {len(found)} files below {package}: does this look one level deep?"
    return found


def all_sources() -> list[Path]:
    return [ROOT / "evenroute" / "__init__.py", *(path for name in PACKAGES for path in sources(name))]


def module_name(path: Path) -> str:
    """`eplb/planner/plan.py` -> `eplb.planner.plan`; an `__init__.py` is its folder."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_modules(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    return modules


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Our modules and those of ours that each imports, also inside functions and for types alone."""
    ours = {module_name(path): path for name in PACKAGES for path in sources(name)}
    return {
        name: {
            module.removeprefix("evenroute.")
            for module in imported_modules(path)
            if module.startswith("evenroute.") and module.removeprefix("evenroute.") in ours
        }
        - {name}
        for name, path in ours.items()
    }


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Every group of nodes that reach each other, written as "a b c"."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[str] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(" ".join(sorted(group)))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b c"]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_folders_hold_few_files() -> None:
    """One concept a folder. The five roots hold what their sub-packages stand on, and may be empty."""
    counts: dict[Path, int] = defaultdict(int)
    for path in all_sources():
        counts[path.parent] += path.name not in ("__init__.py", "__main__.py")
    wrong = {
        str(folder.relative_to(ROOT)): count
        for folder, count in counts.items()
        if count not in FOLDER_FILES and not (folder == ROOT / "evenroute" and count == 0)
    }
    assert wrong == {}, f"files a folder, expected {FOLDER_FILES.start} to {FOLDER_FILES.stop - 1}"


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in all_sources()}
    assert {name: lines for name, lines in lengths.items() if lines > FILE_LINES} == {}


def test_every_sub_package_says_what_its_files_hold() -> None:
    missing = []
    for path in all_sources():
        folder = path.parent
        if path.name != "__init__.py" or folder.parent == ROOT:
            continue
        text = ast.get_docstring(tree(path)) or ""
        words = set(text.replace("`", " ").replace(":", " ").replace(",", " ").split())
        missing += [
            str(other.relative_to(ROOT))
            for other in sorted(folder.glob("*.py"))
            if other.name not in ("__init__.py", "__main__.py") and other.stem not in words
        ]
    assert missing == [], "not named in the docstring of their folder's __init__.py"


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    allowed = PACKAGES[: PACKAGES.index(package) + 1]
    wrong = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in sources(package)
        for module in imported_modules(path)
        if module.startswith("evenroute.") and module.split(".")[1] not in allowed
    }
    assert not wrong


def test_no_circle_between_files() -> None:
    assert circles(import_graph()) == []


def test_no_circle_between_sibling_folders() -> None:
    """Seen from each folder: its sub-folders as one node each, and each of its files as one."""
    parents = {name.rpartition(".")[0] for name in import_graph()}
    parents |= {parent.rpartition(".")[0] for parent in parents}
    found = []
    for parent in sorted(parents - {""}):
        level = parent.count(".") + 2
        siblings: dict[str, set[str]] = defaultdict(set)
        for name, imports in import_graph().items():
            if not name.startswith(f"{parent}."):
                continue
            own = ".".join(name.split(".")[:level])
            others = {
                ".".join(other.split(".")[:level]) for other in imports if other.startswith(f"{parent}.")
            }
            siblings[own] |= others - {own}
        found += circles(siblings)
    assert found == []


@pytest.mark.parametrize(
    ("folder", "never"),
    [
        ("dist.rank", "dist.rebalancer"),
        ("dist.rebalancer", "dist.rank"),
        ("eplb.planner", "eplb.store"),
        ("eplb.planner", "eplb.files"),
        ("eplb.planner", "eplb.dump"),
        ("eplb.files", "eplb.planner"),
    ],
)
def test_folders_that_know_nothing_of_each_other(folder: str, never: str) -> None:
    """Rank and rebalancer are two processes that meet on the wire; planning is a function of counts, not of files."""
    names = [name for name in import_graph() if name.startswith(f"{folder}.")]
    assert names
    wrong = [
        f"{name}: {other}"
        for name in names
        for other in import_graph()[name]
        if other == never or other.startswith(f"{never}.")
    ]
    assert wrong == []


def test_a_public_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in all_sources():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_eplb_never_imports_torch() -> None:
    offenders = [
        path.name
        for path in sources("eplb")
        if any(module.split(".")[0] in {"torch", "triton"} for module in imported_modules(path))
    ]
    assert offenders == []


def test_packages_are_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {
        ".".join(("evenroute", *path.parent.relative_to(ROOT).parts))
        for name in PACKAGES
        for path in sources(name)
    }
    assert listed == {"evenroute", *found}, "a sub-package that is not listed vanishes from the wheel"
    for name in PACKAGES:
        assert (ROOT / name / "py.typed").is_file()
    for folder in {path.parent for name in PACKAGES for path in sources(name)}:
        assert (folder / "__init__.py").is_file(), f"{folder.relative_to(ROOT)} has no __init__.py"


def test_git_and_ruff_see_the_folder_called_dist() -> None:
    ignored = subprocess.run(
        ["git", "check-ignore", "dist/rank/agent.py", "tests/dist/test_agent.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ignored.returncode == 1, f"git ignores {ignored.stdout}"
    files = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--show-files", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert f"{ROOT}/dist/__init__.py" in files


def type_checking_imports() -> Iterator[tuple[str, str]]:
    for node in tree(ROOT / "evenroute" / "__init__.py").body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for inner in node.body:
                if isinstance(inner, ast.ImportFrom) and inner.module:
                    for alias in inner.names:
                        assert alias.asname == alias.name, f"{alias.name}: not re-exported for type checkers"
                        yield alias.name, inner.module.removeprefix("evenroute.")


def test_the_front_door_says_the_same_to_type_checkers() -> None:
    assert dict(type_checking_imports()) == evenroute._HOMES
    assert set(evenroute.__all__) == {*evenroute._HOMES, "__version__"}
    for name, module in evenroute._HOMES.items():
        path = ROOT / Path(*module.split("."))
        defined = tree(path.with_suffix(".py")).body
        assert any(getattr(node, "name", "") == name for node in defined), (
            f"{name} is not defined in {module}"
        )


def run_python(arguments: list[str], cwd: Path) -> str:
    """Output of a Python started in `cwd`, with the source tree reachable as from this process."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def torch_free_names() -> list[str]:
    """The names above the mark in `_HOMES`."""
    text = (ROOT / "evenroute" / "__init__.py").read_text()
    mark = text.index("# From here on with torch.")
    return [name for name in evenroute._HOMES if 0 <= text.find(f'    "{name}": ') < mark]


@pytest.mark.parametrize("folder", ["root", "elsewhere"])
def test_the_front_door_opens_without_torch(folder: str, tmp_path: Path) -> None:
    names = torch_free_names()
    assert {"Placement", "plan_placement", "open_loads", "RebalancerConfig"} <= set(names)
    assert "Router" not in names
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'triton'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name.partition('.')[0])\n"
        "sys.meta_path.insert(0, Block())\n"
        "import evenroute\n"
        "assert 'numpy' not in sys.modules, 'import evenroute alone loads numpy'\n"
        f"for name in {names}:\n"
        "    assert getattr(evenroute, name).__name__ == name\n"
        "assert not {'torch', 'triton'} & set(sys.modules)\n"
        "assert isinstance(evenroute.__version__, str)\n"
        "try:\n"
        "    evenroute.Router\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    told = run_python(["-c", code], ROOT if folder == "root" else tmp_path)
    assert told == "evenroute.Router needs torch, which is not installed: pip install 'evenroute[rank]'"


CHILD = """
import multiprocessing, pickle
from evenroute import Placement, Topology

def digest(placement):
    return placement.digest()

if __name__ == "__main__":
    placement = Placement.initial(2, 8, 12, Topology(4))
    assert pickle.loads(pickle.dumps(placement)).digest() == placement.digest()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(digest, [placement]) == [placement.digest()]
    print("same")
"""


@pytest.mark.parametrize("folder", ["root", "elsewhere"])
def test_the_front_door_works_under_spawn_and_pickle(folder: str, tmp_path: Path) -> None:
    """Spawned children import their parent's script, so it is a file."""
    script = tmp_path / "job.py"
    script.write_text(CHILD)
    assert run_python([str(script)], ROOT if folder == "root" else tmp_path) == "same"


@pytest.mark.parametrize("folder", ["root", "elsewhere"])
def test_python_m_evenroute_is_the_command(folder: str, tmp_path: Path) -> None:
    told = run_python(["-m", "evenroute", "--version"], ROOT if folder == "root" else tmp_path)
    assert told == f"evenroute {evenroute.__version__}"
