"""The local backend's config block."""

from cloudtrain.launcher.config.kinds import Money, Section, Text, key


class Local(Section):
    """This machine; every instance is a process tree of its own."""

    python: Text | None = key(
        None, "Interpreter that runs the job. Default: cloudtrain's own interpreter.", "/opt/venv/bin/python"
    )
    price_per_hour: Money | None = key(
        None,
        "Price of one local instance for an hour, in US dollars; two instances on this machine cost twice. "
        "Without a price no budget applies here.",
        "0.10 USD",
    )
