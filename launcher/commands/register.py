"""`cloudtrain register`: a model folder becomes a version in a registry of models."""

from __future__ import annotations

from pathlib import Path

import click

from ..text.terminal import print_json, print_lines, say, write
from .options import DEFAULT_FILE, examples, json_option, set_option


@click.command(
    "register",
    epilog=examples(
        "cloudtrain register digits-model --to sagemaker --dry-run",
        "cloudtrain register digits-model --to mlflow --store s3://models/registry",
    ),
)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--to", "target", required=True, metavar="NAME", help="sagemaker, azureml, vertex or mlflow.")
@click.option("--name", metavar="NAME", help="The model's name in the registry.  [default: the folder's]")
@click.option("--image", metavar="IMAGE", help="The container image that serves the model.  [default: `image`]")
@click.option("--store", metavar="URI", help="Where the files go; for mlflow only.")
@click.option(
    "-f", "--file", default=DEFAULT_FILE, show_default=True, type=click.Path(path_type=Path), help="The config file."
)
@set_option
@click.option("--dry-run", is_flag=True, help="Print the requests; send nothing.")
@json_option
def command(
    folder: Path,
    target: str,
    name: str | None,
    image: str | None,
    store: str | None,
    file: Path,
    settings: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Upload a checked model folder, and register the folder as a version of a model.

    The same folder under the same name is one version, however often it is registered. Region, bucket and account come
    from the config file, as for a job.
    """
    from ..backend.models import as_requests
    from ..models import registering
    from ..models.checked import checked_model
    from ..planning.render import as_json as as_json_text

    model = checked_model(folder, name, image)
    registry = registering.registry_of(target, model, file, settings, store)
    if dry_run:
        write(as_json_text(as_requests(registry.uri, model, registry.calls)))
        return
    version, is_new = registering.register(registry)
    if as_json:
        print_json({"version": version, "is_new": is_new, "sha256": model.digest, "uri": registry.uri})
        return
    print_lines([version])
    if is_new:
        numbers = ", ".join(f"{key} {value:.6g}" for key, value in model.metrics.items())
        say(f"registered at {target}" + (f", with the metrics of `{model.split}`: {numbers}" if numbers else ""))
    else:
        say(f"{target} has this folder already: nothing was changed")
