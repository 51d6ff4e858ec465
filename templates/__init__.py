"""Job specs and starter projects: data read with `importlib.resources`, no decisions."""
