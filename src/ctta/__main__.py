"""``python -m ctta``, and so ``torchrun --nproc-per-node 2 -m ctta``: the command ``ctta``."""

from ctta.cli import main

if __name__ == "__main__":
    main()
