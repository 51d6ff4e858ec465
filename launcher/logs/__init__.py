"""A job's log: a single stream of all nodes and ranks, its view on the terminal, and its local cache."""
