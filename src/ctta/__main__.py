"""Run the command ``ctta`` as ``python -m ctta``, or ``torchrun --nproc-per-node 2 -m ctta``."""

from ctta.cli import main

if __name__ == "__main__":
    main()
