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


def main() -> None:
    """Write the three files, with the command as a user would type it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the matrix, or its numbers.json to write the page again")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder to write to")
    arguments = parser.parse_args()
    matrix = replace(read_matrix(arguments.run), commands=PLANNED["matrix"].commands[:1])
    arguments.out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_matrix(matrix, Path(temporary)).parent
        for name, copy in FILES.items():
            shutil.copy(folder / name, arguments.out / copy)


if __name__ == "__main__":
    main()
