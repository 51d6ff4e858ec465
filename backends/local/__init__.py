"""This machine as a cluster: one agent, one address and one folder for each node."""
