"""Fuzz a reader of foreign bytes, guided by coverage.

    pip install 'atheris>=3.0'                        # the group fuzz: Linux, CPython 3.11 to 3.13
    python -m benchmarks.chaos.fuzz protocol --seconds 60   # or checkpoint, csv, settings, run

The targets are those of ``tests/fuzz_targets.py``. It starts from ``tests/corpus/TARGET/`` and from what it found
before, which is kept in ``.fuzz/TARGET/``. An input that makes a target fail is written to ``tests/corpus/TARGET/``:
mend the reader, give the file a name that says what it is, and the tests will try it from then on.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_INPUT = 8192  # bytes
MAX_MEMORY = 3072  # MB, of which torch takes most
MAX_SECONDS = 30  # of one input; longer is a hang
NAMES = ("checkpoint", "protocol", "csv", "settings", "run")


def main() -> None:
    """Fuzz the target that the command line names."""
    parser = argparse.ArgumentParser(description="Fuzz a reader of foreign bytes, guided by coverage.")
    parser.add_argument("target", choices=NAMES)
    parser.add_argument("--seconds", type=int, default=60, help="duration")
    arguments = parser.parse_args()
    try:
        import atheris
    except ImportError:
        sys.exit("coverage-guided fuzzing needs atheris (Linux, CPython 3.11 to 3.13): pip install 'atheris>=3.0'")
    sys.path.insert(0, str(ROOT / "tests"))
    with atheris.instrument_imports(include=["ctta"]):
        from fuzz_targets import CORPUS, TARGETS
    assert tuple(TARGETS) == NAMES
    found, seeds = ROOT / ".fuzz" / arguments.target, CORPUS / arguments.target
    found.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={arguments.seconds}",
        f"-max_len={MAX_INPUT}",
        f"-rss_limit_mb={MAX_MEMORY}",
        f"-timeout={MAX_SECONDS}",
        f"-artifact_prefix={seeds}/",
        "-print_final_stats=1",
    ]

    def run_target(data: bytes) -> None:
        TARGETS[arguments.target](data)

    atheris.Setup([sys.argv[0], *options, str(found), str(seeds)], run_target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
