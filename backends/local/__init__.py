"""This machine as a cluster: one agent, one address and one folder a node."""
