"""Write docs/results/matrix: the numbers, the page and the heat map of a run of ``ctta bench matrix``.

    ctta bench matrix --threads 1 --out runs/matrix
    python benchmarks/matrix_results.py runs/matrix

Protocols that are not complete are listed at the end of the page; run both commands again to add them.
"""

import argparse
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from result_list import PLANNED

from ctta.report import read_matrix, write_matrix

RESULTS = Path(__file__).parent.parent / "docs" / "results" / "matrix"

#: The files to keep, by their names in the report; the others can be written again from the numbers.
FILES = {"numbers.json": "numbers.json", "heat-map.png": "heat-map.png", "matrix.md": "README.md"}


def write_results(run: Path, out: Path) -> None:
    """Write the three files, with the command as a user would type it.

    Args:
        run: Folder of the matrix, or its ``numbers.json``.
        out: Folder to write to.
    """
    matrix = replace(read_matrix(run), commands=PLANNED["matrix"].commands[:1])
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_matrix(matrix, Path(temporary)).parent
        for name, copy in FILES.items():
            shutil.copy(folder / name, out / copy)


def main() -> None:
    """Write docs/results/matrix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the matrix, or its numbers.json to write the page again")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder to write to")
    arguments = parser.parse_args()
    write_results(arguments.run, arguments.out)


if __name__ == "__main__":
    main()
