"""A job after its request exists: submit, follow, refresh, retry, stop, remove, adopt; a job as all screens show it."""
