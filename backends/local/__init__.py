"""This machine as a cluster: one agent, one address and one folder for each node."""

from cloudtrain.launcher.backend_table import BackendTraits

TRAITS = BackendTraits(
    block="cloudtrain.backends.local.block.Local",
    help="This machine.",
    example={"python": "/opt/venv/bin/python"},
    runs_here=True,
)
