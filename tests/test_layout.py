"""The structure of the package: direction of imports, public names, dependencies, unique class names."""

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import ctta
from scripts.layout import PAGE, ROWS, fill_table, read_subject

PACKAGE = Path(ctta.__file__).parent

#: Methods that extend another one. Else a method imports only itself and the parts that methods share.
EXTENSIONS = {"eata": "eta", "rdumb": "eta", "cmf": "roid"}


def modules() -> list[Path]:
    """Return every file of the package but the top-level ``__init__``."""
    return [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]


def top_level_exports() -> dict[str, str]:
    """Return the names that ``ctta/__init__.py`` imports, each with the module that it comes from."""
    exports: dict[str, str] = {}
    for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ctta."):
            exports |= {alias.name: node.module.removeprefix("ctta.") for alias in node.names}
    every_method = exports.pop("*")
    return exports | {cls.__name__: every_method for cls in ctta.METHODS.values()}


def resolve(name: str) -> str | None:
    """Return the module behind ``ctta.<name>``: a submodule, or the one that a top-level name comes from."""
    if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists():
        return name
    return top_level_exports().get(name)  # None for __version__


def imported_modules(tree: ast.AST) -> set[str]:
    """Return the modules of ctta that a syntax tree imports, without the prefix, such as 'views.average'."""
    found: set[str | None] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {each.name.removeprefix("ctta.") for each in names if each.name.startswith("ctta.")}
            case ast.ImportFrom(level=level) if level:
                raise AssertionError(f"relative import in line {node.lineno}")
            case ast.ImportFrom(module="ctta", names=names):
                found |= {resolve(each.name) for each in names}
            case ast.ImportFrom(module="ctta.core" | "ctta.data" as package, names=names):
                found |= {f"{package.removeprefix('ctta.')}.{each.name}" for each in names}
            case ast.ImportFrom(module=str(module)) if module.startswith("ctta."):
                found.add(module.removeprefix("ctta."))
            case ast.Attribute(value=ast.Name(id="ctta"), attr=name):
                found.add(resolve(name))
    return {name for name in found if name}


def find_room(module: str) -> str:
    """Return the room of a module, such as 'core.model' for itself and 'data.streams' for 'data.streams.ccc'."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] in ("core", "data") else parts[0]


def find_position(room: str) -> tuple[int, int]:
    ((row, rooms),) = [(number, rooms) for number, rooms in enumerate(ROWS) if room in rooms]
    return row, rooms.index(room)


def list_imports() -> list[tuple[str, str]]:
    """Return the imports between modules of the package, the packages ``core`` and ``data`` themselves left out."""
    found = []
    for path in modules():
        importer = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        found += [(importer, name) for name in imported_modules(ast.parse(path.read_text()))]
    return [(importer, name) for importer, name in found if not {importer, name} & {"core", "data"}]


def test_imports_go_in_one_direction() -> None:
    for importer, imported in list_imports():
        room, other = find_room(importer), find_room(imported)
        assert room == other or find_position(other) < find_position(room), f"{importer} imports {imported}"


def test_every_room_is_in_the_table_of_the_docs() -> None:
    """If it fails: python scripts/layout.py."""
    entries = {path.stem for path in PACKAGE.iterdir() if (path / "__init__.py").exists() or path.suffix == ".py"}
    assert entries - {"__init__"} == {room.partition(".")[0] for row in ROWS for room in row}
    assert all(read_subject(room) for room in entries)
    assert PAGE.read_text() == fill_table(PAGE.read_text())


def test_methods_do_not_import_each_other() -> None:
    for importer, imported in list_imports():
        if importer.startswith("methods.") and imported.startswith("methods."):
            method, other = importer.split(".")[1], imported.split(".")[1]
            assert other in (method, "parts", EXTENSIONS.get(method)), f"{importer} imports {imported}"


def test_every_form_of_import_is_seen() -> None:
    source = """
import torch, ctta.data.streams.folders
import ctta
from ctta import models, evaluate, __version__
from ctta.views.average import View
version = ctta.__version__
ctta.Guarded
"""
    packages = {name.split(".")[0] for name in imported_modules(ast.parse(source))}
    assert packages == {"data", "models", "evaluation", "views", "guard"}


def test_public_names() -> None:
    submodules = {path.stem for path in PACKAGE.iterdir() if not path.name.startswith("_")}
    assert set(top_level_exports()) - submodules == set(ctta.__all__) - submodules  # those that type checkers see
    for name, module in top_level_exports().items():
        assert getattr(ctta, name) is getattr(importlib.import_module(f"ctta.{module}"), name)
    for name in ctta.__all__:
        assert getattr(ctta, name) is not None and name in dir(ctta)
    public = {name for name in vars(ctta) if not name.startswith("_")}
    imported = {
        "Any",
        "Loader",
        "MetaPathFinder",
        "ModuleSpec",
        "ModuleType",
        "TYPE_CHECKING",
        "importlib",
        "sys",
        "warnings",
    }
    assert public - submodules - imported <= set(ctta.__all__)
    with pytest.raises(AttributeError):
        getattr(ctta, "non" + "sense")


def test_parts_of_data_are_imported_when_they_are_used() -> None:
    script = "import ctta; ctta.data.streams.video, ctta.data.datasets.sample, ctta.data.corruptions, ctta.data.streets"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("old", "new"), [("streams", "data.streams"), ("advisor", "advise"), ("streams.ccc", "data.streams.ccc")]
)
def test_modules_that_have_moved_keep_their_old_names(old: str, new: str) -> None:
    """In a new interpreter, since the warning comes with the first import."""
    script = """
import importlib, sys, warnings
old, new = (importlib.import_module(f"ctta.{name}") if number else name for number, name in enumerate(sys.argv[1:]))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    moved = importlib.import_module(f"ctta.{old}")
assert moved is new and new.__spec__.name == new.__name__
messages = [str(each.message) for each in caught if each.category is DeprecationWarning]
assert messages[-1].endswith(f"use 'from {new.__name__} import ...'")
"""
    run_python(script, old, new)


def test_release_notes_list_the_modules_that_have_moved() -> None:
    notes = (PACKAGE.parents[1] / "CHANGELOG.md").read_text()
    rows = re.findall(r"^\| `ctta\.(\S+)` \| `ctta\.(\S+)` \|$", notes, re.MULTILINE)
    assert dict(rows) == vars(ctta)["_MOVED"]


def test_a_method_is_found_by_its_name() -> None:
    """Its file or folder, its class, and ``ctta.<class>``."""
    for name, cls in ctta.METHODS.items():
        assert cls.__module__.split(".")[:3] == ["ctta", "methods", name]
        assert cls.__name__.lower() == name.replace("_", "")
        assert getattr(ctta, cls.__name__) is cls
    assert list(ctta.METHODS)[:6] == ["source", "bn_stats", "pseudo_label", "tent", "test_aug", "cotta"]


def test_a_method_needs_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    class New(ctta.Tent):
        pass

    monkeypatch.setitem(ctta.METHODS, "new", New)
    assert getattr(ctta, "New", None) is New and "New" in ctta.__all__
    monkeypatch.delattr(ctta, "New")


def run_python(script: str, *arguments: object) -> str:
    """Return what a script prints in a new interpreter."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_nothing_is_imported_before_it_is_needed() -> None:
    """In a new interpreter, the list of commands needs no torch, and a method no packages that it does not use."""
    script = """
import sys
from ctta.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
heavy = {"torch", "numpy", "safetensors", "matplotlib", "fastapi", "PIL"} & sys.modules.keys()
import ctta
ctta.CoTTA, ctta.Guarded, ctta.load, ctta.adapt, ctta.models, ctta.policies, ctta.source_stats
print([sorted(heavy), sorted(name.removeprefix("ctta.") for name in sys.modules if name.startswith("ctta."))])
"""
    *_, last = run_python(script).splitlines()
    heavy, modules = ast.literal_eval(last)
    assert heavy == []
    packages = {name.split(".")[0] for name in modules}
    assert "methods" in packages
    assert packages.isdisjoint({"adapt", "advise", "benchmark", "data", "evaluation", "serve", "testing"})


def test_a_function_goes_before_a_subpackage_of_its_name() -> None:
    """In a new interpreter, where the subpackage is imported first."""
    script = "import ctta.adapt, ctta.advise, ctta.source_stats"
    run_python(f"{script}\nassert all(callable(each) for each in (ctta.adapt, ctta.advise, ctta.source_stats))")


def test_loading_a_guarded_model_imports_the_guard(tmp_path: Path) -> None:
    """In a new interpreter, where nothing else has imported it."""
    build = """
import sys, torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
"""
    run_python(
        f"{build}\nimport ctta; ctta.save(ctta.Guarded(ctta.Tent(net)), sys.argv[1])", tmp_path / "a.safetensors"
    )
    script = """
from ctta.checkpoint import load
assert "ctta.guard" not in sys.modules
print(type(load(sys.argv[1], net)).__name__)
"""
    assert run_python(build + script, tmp_path / "a.safetensors") == "Guarded\n"


def test_import_needs_only_the_required_dependencies() -> None:
    """In a new interpreter, ``import ctta`` loads nothing but the dependencies that every installation has."""
    script = """
import sys, torch, numpy, safetensors.torch
before = set(sys.modules)
import ctta
new = {name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(sorted(new))
"""
    loaded = set(ast.literal_eval(run_python(script)))
    assert loaded <= {"ctta", "numpy", "safetensors", "torch", "typing_extensions"}


def test_every_package_is_reachable_after_import() -> None:
    """In a new interpreter, where no test has imported them yet."""
    packages = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
    # Their public names are in ctta itself, or they have none.
    hidden = {"adapt", "advise", "checkpoint", "cli", "core", "io", "methods", "nn", "optim", "source_stats"}
    script = "import ctta, sys\nprint([getattr(ctta, name).__name__ for name in sys.argv[1:]])"
    names = [name for name in packages if name not in hidden]
    assert {"data", "serve", "evaluation"} <= set(names)
    assert ast.literal_eval(run_python(script, *names)) == [f"ctta.{name}" for name in names]


def test_imports_and_checkpoints_work_without_unix_features(tmp_path: Path) -> None:
    """Windows has no ``resource`` and ``fcntl``, and cannot open directories, so it cannot sync them either."""
    script = """
import importlib, os, pkgutil, sys
import torch

sys.modules["resource"] = sys.modules["fcntl"] = None
del os.O_DIRECTORY
open_any = os.open

def open_file(path, *args, **kwargs):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return open_any(path, *args, **kwargs)

os.open = open_file

import ctta
for module in pkgutil.walk_packages(ctta.__path__, "ctta."):
    if module.name != "ctta.__main__":
        importlib.import_module(module.name)

net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
model, x = ctta.Tent(net), torch.randn(8, 4)
model(x)
ctta.save(model, sys.argv[1])
assert torch.equal(ctta.load(sys.argv[1], net)(x), model(x))
"""
    run_python(script, tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_class_names_are_unique() -> None:
    """A class can be found, and named in a message, without its module."""
    names: Counter[str] = Counter()
    for path in modules():
        names.update(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []
