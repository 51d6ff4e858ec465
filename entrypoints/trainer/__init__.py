"""The shared trainer: one process per rank runs train.py with the user's task file."""
