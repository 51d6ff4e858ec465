"""One folder for each backend, with the same file names; `cloudtrain.launcher.backend` finds a backend by its name."""
