"""A job after its request exists: submit, follow, refresh, retry, stop, remove, adopt, describe."""
