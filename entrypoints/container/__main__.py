"""`python -m cloudtrain.entrypoints.container ROOT ORDER ...`: the command of a managed platform's container."""

import sys

from .container import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
