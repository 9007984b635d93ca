"""How the house is built: the direction of imports, the public names, and what `import ctta` needs."""

import ast
import subprocess
import sys
from pathlib import Path

import ctta

PACKAGE = Path(ctta.__file__).parent

#: A module imports only from rows above its own; modules of one row and one folder may see each other where that
#: folder is a package of its own (views, testing), while methods are blind to each other.
ROWS = [
    ["errors", "io", "parallel", "functional", "norms", "optim"],
    ["surgery"],
    ["views", "validation", "hyperparameters"],
    ["base"],
    ["methods", "corruptions", "synthetic", "models"],
    ["checkpoint", "guard", "distributed", "datasets", "streams"],
    ["testing", "evaluation"],
    ["report", "benchmark", "advise", "inference", "serve"],
    ["cli"],
    ["__main__"],
]
BLIND_TO_EACH_OTHER = {"methods"}


def imports_of(path: Path) -> set[str]:
    """The modules of ctta that a file imports, such as 'views.average'."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return {name.removeprefix("ctta.") for name in found if name.startswith("ctta.")}


def row_of(part: str) -> int:
    (row,) = [number for number, parts in enumerate(ROWS) if part in parts]
    return row


def modules() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]


def test_imports_go_one_way() -> None:
    for path in modules():
        part = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for name in imports_of(path):
            other = name.split(".")[0]
            if other == part:
                assert part not in BLIND_TO_EACH_OTHER or path.name == "__init__.py", f"{path} imports {name}"
            elif row_of(other) == row_of(part):
                assert ROWS[row_of(part)].index(other) < ROWS[row_of(part)].index(part), f"{path} imports {name}"
            else:
                assert row_of(other) < row_of(part), f"{path} imports {name}"


def test_the_public_names_are_exactly_these() -> None:
    assert sorted(ctta.__all__) == sorted(set(ctta.__all__))
    public = {name for name in vars(ctta) if not name.startswith("_")}
    submodules = {path.stem for path in PACKAGE.iterdir() if not path.name.startswith("_")}
    assert public - submodules - {"version"} == set(ctta.__all__) - submodules
    for name in ("AdaptiveModel", *(cls.__name__ for cls in ctta.METHODS.values())):
        assert name in ctta.__all__


def test_method_names() -> None:
    assert list(ctta.METHODS) == ["source", "bn_stats", "pseudo_label", "tent", "test_aug", "cotta"]
    assert [cls.__name__ for cls in ctta.METHODS.values()] == [
        "Source",
        "BNStats",
        "PseudoLabel",
        "Tent",
        "TestAug",
        "CoTTA",
    ]


def test_import_needs_torch_numpy_and_safetensors_only() -> None:
    """In a fresh interpreter, every import that comes from outside torch's own tree is one of the three."""
    script = """
import sys, torch, numpy, safetensors.torch
before = set(sys.modules)
import ctta
new = {name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(sorted(new))
"""
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert set(ast.literal_eval(output)) <= {"ctta", "numpy", "safetensors", "torch", "typing_extensions"}
