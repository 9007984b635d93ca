"""Write docs/results/matrix: the numbers, the page and the heat map of a run of ``ctta bench matrix``.

    ctta bench matrix --threads 1 --out runs/matrix
    python -m benchmarks.results.matrix runs/matrix

Protocols that are not complete are listed at the end of the page; run both commands again to add them. A run of some
protocols, or of some methods, replaces these, and leaves the others as they were measured before.
"""

import argparse
import math
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.results.planned import PLANNED
from ctta.benchmark.report import read_matrix, write_matrix
from ctta.benchmark.report.matrix import Matrix, MatrixProtocol
from ctta.data.streams import PROTOCOLS

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "matrix"

#: The files to keep, by their names in the report; the others can be written again from the numbers.
FILES = {"numbers.json": "numbers.json", "heat-map.png": "heat-map.png", "matrix.md": "README.md"}


def merge(earlier: Matrix, later: Matrix) -> Matrix:
    """Return the protocols of two matrices; a cell that both have is the later one.

    Args:
        earlier: What was measured before.
        later: What replaces it.

    Returns:
        The protocols in the order of :data:`ctta.data.streams.PROTOCOLS`.
    """
    replaced = {each.name for each in later.protocols}
    before = {each.name: each for each in earlier.protocols}
    protocols = [each for each in earlier.protocols if each.name not in replaced]
    protocols += [merge_cells(before[each.name], each) if each.name in before else each for each in later.protocols]
    places = {name: place for place, name in enumerate(PROTOCOLS)}
    protocols.sort(key=lambda each: (places.get(each.name.partition(",")[0], len(places)), each.name))
    missing = [each for each in earlier.missing if each.run not in replaced] + list(later.missing)
    return replace(later, protocols=tuple(protocols), missing=tuple(missing))


def merge_cells(earlier: MatrixProtocol, later: MatrixProtocol) -> MatrixProtocol:
    """Return the methods of both measurements of a protocol.

    Which methods are within noise of the best one is known for those of one run. Those that were remain, with all whose
    error is not above theirs now.

    Args:
        earlier: What was measured before.
        later: What replaces it.

    Returns:
        The protocol with every method.

    Raises:
        ValueError: The streams are not the same.
    """
    if earlier.cells.keys() <= later.cells.keys():
        return later
    is_same = math.isclose(earlier.source.error, later.source.error, abs_tol=1e-5)  # numbers.json rounds
    if not is_same or earlier.composition != later.composition:
        raise ValueError(f"the streams of {later.name} differ: Source has {earlier.source.error}, {later.source.error}")
    cells = earlier.cells | later.cells
    limit = max(cells[label].error for label in earlier.best)
    found = [label for label in cells if cells[label].error <= limit]
    return replace(later, cells=cells, best=tuple(sorted(found, key=lambda label: cells[label].error)))


def write_results(run: Path, out: Path) -> None:
    """Write the three files, with the command as a user would type it.

    Args:
        run: Folder of the matrix, or its ``numbers.json``.
        out: Folder to write to; protocols that it has and the run does not are kept.
    """
    matrix = read_matrix(run)
    if (out / "numbers.json").exists():
        matrix = merge(read_matrix(out / "numbers.json"), matrix)
    matrix = replace(matrix, commands=PLANNED["matrix"].commands[:1])
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
