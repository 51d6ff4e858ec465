"""`cloudtrain push`: bring a model folder to the machines, the bucket or the folder that serve the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import UsageError
from ..text.terminal import print_json, print_lines
from .options import DEFAULT_FILE, cli_command, flag, json_option, path_option

if TYPE_CHECKING:
    from ..config.schema import JobConfig


@cli_command(
    "push",
    "cloudtrain push digits-model gpu1,gpu2:/srv/models/digits",
    "cloudtrain push digits-model s3://my-bucket/models/digits",
    "cloudtrain push --back gpu1,gpu2:/srv/models/digits",
)
@click.argument("words", nargs=-1, required=True, metavar="[DIR] PLACE")
@path_option("-f", "--file", help="The config with the settings of the hosts.")
@click.option("--name", help="The model's name at the place.  [default: the model's own]")
@flag("--replace", "replaces", help="Also replace a model with a different name.")
@flag("--back", "goes_back", help="Return to the version before the current one.")
@json_option
def command(
    words: tuple[str, ...], file: Path | None, name: str | None, replaces: bool, goes_back: bool, as_json: bool
) -> int:
    """Bring a model folder to the machines, the bucket or the folder that serve the model.

    PLACE is HOST,HOST:PATH, a uri of a bucket, or a local folder. A server opens PATH/current, and sees the old model
    or the new model, never a part. A folder without a passed check is refused. Exit code 7 if a target failed.
    """
    from ..models import push as pushing

    if len(words) != (1 if goes_back else 2):
        hint = "cloudtrain push --back PLACE" if goes_back else "cloudtrain push DIR PLACE"
        raise UsageError(f"{'a place is' if goes_back else 'a folder and a place are'} expected", hint=hint)
    config = _settings(file)
    if goes_back:
        ends = pushing.back(words[0], config)
    else:
        model = pushing.pushed(Path(words[0]), name)
        ends = pushing.push(model, words[1], config, replaces=replaces)
    if as_json:
        rows = [{"target": name, "version": each.version, "error": each.error or None} for name, each in ends.items()]
        print_json({"targets": rows})
    else:
        print_lines([f"{name}: {each.error or f'version {each.version} is current'}" for name, each in ends.items()])
    return 7 if any(each.error for each in ends.values()) else 0


def _settings(file: Path | None) -> JobConfig | None:
    """Return the config with the settings of the user's machines, if the file has such settings."""
    from .. import backend as backends
    from .. import config as configs
    from ..backend_table import traits

    chosen = Path(DEFAULT_FILE) if file is None else file
    if file is None and not chosen.exists():
        return None
    own = (each for each in configs.backends_configured(chosen) if traits(each).own_machines)
    name = next((each for each in own if isinstance(backends.load(each), backends.ReceivesModels)), None)
    return None if name is None else configs.load(chosen, backend=name)
