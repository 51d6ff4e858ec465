"""What a job runs in on a host of the user's own: as it is, a venv, conda, a container."""
