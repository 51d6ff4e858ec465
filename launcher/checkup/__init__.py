"""The checks of `doctor`: of this installation, and of each backend."""
