"""The supervisor of a node: starts boot and torchrun, joins the other nodes' agents, restarts and ends the ranks.

Any Python 3 must parse this file: a node of Slurm and `local.python` start here, with an interpreter that nobody tried.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036
    version = sys.version.split()[0]
    sys.exit(
        f"Python 3.10 or newer is needed, and {sys.executable} is {version}: name a newer one in the backend's "
        "`python`, or an `image` that has one"
    )
