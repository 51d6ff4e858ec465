"""A backend for cloudtrain: a small scheduler whose nodes are processes of this machine."""

from cloudtrain.launcher.backend_table import BackendTraits

__all__ = ["TRAITS"]

TRAITS = BackendTraits(
    block="cloudtrain_processes.block.Processes",
    help="A small scheduler on this machine.",
    example={"partition": "large"},
    foreign_keys={"partition": "queue qos"},
    runs_here=True,
)
