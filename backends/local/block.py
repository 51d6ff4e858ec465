"""The local backend's config block."""

from pydantic import Field

from cloudtrain.launcher.config.kinds import Money, Section, Text


class Local(Section):
    """This machine; every instance is a process tree of its own."""

    python: Text | None = Field(
        None,
        description="Interpreter that runs the job. Default: cloudtrain's own interpreter.",
        examples=["/opt/venv/bin/python"],
    )
    price_per_hour: Money | None = Field(
        None,
        description="Price of one local instance for an hour, in US dollars; two instances on this machine cost twice. "
        "Without a price no budget applies here.",
        examples=["0.10 USD"],
    )
