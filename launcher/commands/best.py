"""`cloudtrain best`: the best trial of a sweep, and its config as a file."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import ConfigError, UsageError
from ..planning.request_rules import shared_places
from ..planning.search_spec import trial_config
from ..store.registry import Registry
from ..sweeps import overview
from ..text.terminal import print_json, print_text, say
from .options import cli_command, json_option, path_option


@cli_command("best", "cloudtrain best last", "cloudtrain best digits-x7k2p -o best.yaml")
@click.argument("sweep", default="last")
@path_option("-o", "--output", help="Write the config with the values here.")
@json_option
def command(sweep: str, output: Path | None, as_json: bool) -> int:
    """Show the best trial of a sweep: its metric and its values; `artifacts` has its weights.

    With -o, write the config of the sweep with the trial's values, ready for `submit`. The best of many noisy
    evaluations is too good by chance: evaluate the trial once more, on data that chose no trial.
    """
    registry = Registry()
    found = registry.find(sweep)
    if not found.config.get("sweep"):
        raise UsageError(f"{found.id} is no sweep", hint="cloudtrain status shows its metrics")
    shown = overview.as_json(registry.database, found)
    if not shown["best"]:
        say(f"{found.id} has no result yet")
        return 1
    first = shown["best"][0]
    if output is not None:
        import yaml

        if output.absolute() == Path(found.config_file):
            raise ConfigError("this is the file of the sweep", where=output, hint="choose another name")
        config = trial_config(shared_places(found.config, found.id), first["values"])
        data = config.model_dump(mode="json", exclude_defaults=True)
        try:
            output.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the file cannot be written: {error.strerror}", where=output) from error
        without = "; without a budget: the sweep's is for all trials together" if found.config["budget"] else ""
        say(f"wrote {output}{without}")
    if as_json:
        print_json({"job": found.id, "metric": shown["metric"], **first})
        return 0
    value = overview.figure(first["value"])
    lines = [f"trial {first['trial']} of {found.id}: {shown['metric']} {value} at {overview.ended_at(shown, first)}"]
    print_text([*lines, *(f"  {key}: {value}" for key, value in first["values"].items())])
    return 0
