"""Run the named cases on this rank."""

import sys
import traceback
import warnings
from pathlib import Path

import torch

import ctta
from ranks import load_cases, write_outcome


def main(folder: Path, names: list[str]) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    cases = load_cases()  # with the device, if it is a simulated one
    ctta.distributed.init(300)
    for name in names:
        try:
            cases[name](folder)
        except BaseException:
            write_outcome(folder, name, traceback.format_exc())
            break  # the other ranks are at another place by now
        write_outcome(folder, name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
