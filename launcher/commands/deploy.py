"""`cloudtrain deploy`: an endpoint for a model folder, with an end that the platform enforces."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import UsageError
from ..text.terminal import confirm, print_json, print_lines, say, write
from .options import (
    DEFAULT_FILE,
    WholeNumber,
    duration_s,
    examples,
    json_option,
    set_option,
    yes_option,
)


@click.command(
    "deploy",
    epilog=examples(
        "cloudtrain deploy digits-model --to sagemaker --ttl 8h --instance-type ml.g4dn.xlarge --dry-run",
        "cloudtrain deploy digits-model --to sagemaker --ttl 8h --instance-type ml.g4dn.xlarge",
    ),
)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--to", "target", required=True, metavar="NAME", help="sagemaker; azureml and vertex with --dry-run.")
@click.option("--ttl", metavar="DURATION", help="The endpoint's lifetime: `8h`, `2d`.  [required]")
@click.option("--name", metavar="NAME", help="The model's name.  [default: the folder's]")
@click.option("--instances", type=WholeNumber(min=1, max=1000), default=1, show_default=True, help="How many machines.")
@click.option("--instance-type", metavar="NAME", help="The machine.  [default: resources.instance_type]")
@click.option("--image", metavar="IMAGE", help="The container image that serves the model.  [default: `image`]")
@click.option(
    "-f", "--file", default=DEFAULT_FILE, show_default=True, type=click.Path(path_type=Path), help="The config file."
)
@set_option
@click.option("--dry-run", is_flag=True, help="Print the requests and the price; send nothing.")
@yes_option
@json_option
def command(
    folder: Path,
    target: str,
    ttl: str | None,
    name: str | None,
    instances: int,
    instance_type: str | None,
    image: str | None,
    file: Path,
    settings: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Start an endpoint that answers requests with a model, for a limited time.

    An endpoint is billed until it is deleted, with or without requests. So each endpoint has a lifetime, and the
    platform deletes the endpoint at its end, with your computer on or off: an endpoint without an end is not sent. The
    worst case counts in your budgets until the platform says that the endpoint is gone.
    """
    from ..backend.models import as_requests
    from ..models import deploying
    from ..models.checked import checked_model
    from ..planning.render import as_json as as_json_text
    from ..store.registry import Registry
    from ..text.money import as_usd

    if ttl is None:
        raise UsageError("an endpoint needs an end: it is billed until it is deleted", hint="--ttl 8h")
    if instance_type is not None:
        settings = (*settings, f"resources.instance_type={instance_type}", "resources.accelerators=null")
    ttl_s, model = duration_s("--ttl", ttl), checked_model(folder, name, image)
    found = deploying.planned(target, model, file, settings, ttl_s=ttl_s, instances=instances)
    told = {
        "endpoint": found.plan.name,
        "usd_per_hour": None if found.plan.hourly_usd is None else found.plan.hourly_usd * instances,
        "worst_case_usd": as_usd(found.worst_micro),
        "ends_s": found.wish.ends_s,
        "delete": found.plan.delete,
    }
    for line in found.lines():
        say(line)
    if dry_run:
        write(as_json_text({**as_requests(found.plan.uri, model, found.plan.calls), **told}))
        return 0
    registry = Registry()
    deploying.check_room(registry, found)
    if not confirm("Start the endpoint?", yes=yes):
        say("not sent")
        return 1
    for line in deploying.send(registry, found):
        say(line)
    if as_json:
        print_json(told)
    else:
        print_lines([found.plan.name])
    return 0
