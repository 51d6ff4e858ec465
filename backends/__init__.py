"""One folder for each backend, with equal file names; `cloudtrain.launcher.backend` finds a backend by its name."""
