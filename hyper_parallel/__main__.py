"""`python -m hyper_parallel` is `hyper-parallel`: what torchrun and msrun start."""

import sys

from hyper_parallel.cli import main

if __name__ == "__main__":
    sys.exit(main())
