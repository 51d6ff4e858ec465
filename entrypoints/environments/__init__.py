"""The environment of a job on a host of the user's own: the host's Python, a venv, conda, a container."""
