"""A job's lines: one stream of all nodes and ranks, what of it is shown and how, and what of it is kept here."""
