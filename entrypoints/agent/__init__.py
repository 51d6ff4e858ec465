"""The supervisor of a node: starts boot and torchrun, joins the other nodes' agents, restarts and ends the ranks."""
