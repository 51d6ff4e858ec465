"""Runs a script under SageMaker's own toolkit with the all-reduce library SMDDP, and never without the library.

The toolkit starts this file as the job's program, with mpirun and the hyperparameters as arguments; CLOUDTRAIN_SCRIPT
names the script in the bundle. In an image without the library, the toolkit would silently train over another backend.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path

LIBRARY = "smdistributed.dataparallel.torch.torch_smddp"


def main() -> None:
    """Import the library, then run the script like `python SCRIPT`; exit with a message if the library is missing."""
    bundle = Path(__file__).resolve().parents[4]
    script = bundle / os.environ["CLOUDTRAIN_SCRIPT"]
    sys.argv[0] = str(script)
    sys.path[0] = str(script.parent)
    sys.path.append(str(bundle / "code"))
    try:
        importlib.import_module(LIBRARY)
    except ImportError as error:
        sys.exit(
            f"this image has no SMDDP library ({error}): use an image with the library, up to PyTorch 2.4.1, or write "
            "`distribution: torchrun`"
        )
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
