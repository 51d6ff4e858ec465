"""Wrong calls of the Python interface. In `make lint`, mypy finds each, or reports a comment too many."""

from cloudtrain.launcher.api import Config, submit, wait

submit("cloudtrain.yaml")  # type: ignore[call-overload]
print(submit(Config(), dry_run=True).state)  # type: ignore[attr-defined]
print(wait("last", timeout=3))  # type: ignore[call-arg]
print(wait("last").state.upper() + 1)  # type: ignore[operator]
