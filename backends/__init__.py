"""One folder for each backend, with the same file names, and two shared modules: `edge` (errors) and `http` (calls).

`cloudtrain.launcher.backend` finds a backend by its name.
"""
