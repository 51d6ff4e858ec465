"""`cloudtrain best`: the best trial of a sweep, and its config as a file."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import ConfigError
from ..planning.search_spec import is_packed
from ..store import sweeps
from ..store.registry import Registry
from ..sweeps import driving, overview
from ..text.terminal import print_json, print_text, say
from .options import examples, json_option


@click.command("best", epilog=examples("cloudtrain best last", "cloudtrain best digits-x7k2p -o best.yaml"))
@click.argument("sweep", default="last")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the config with the values here.")
@json_option
def command(sweep: str, output: Path | None, as_json: bool) -> int:
    """Show the best trial of a sweep: its metric, its values, and the job with its weights.

    With -o, write the config of the sweep with the trial's values, ready for `submit`. The best of many noisy
    evaluations is too good by chance: evaluate the trial once more, on data that chose no trial.
    """
    database = Registry().database
    found = sweeps.find(database, sweep)
    shown = overview.as_json(database, found)
    if not shown["best"]:
        say(f"{found.id} has no result yet")
        return 1
    first = shown["best"][0]
    first = {**first, "job": found.id if is_packed(found.config) else f"{found.id}-{first['trial']}"}
    if output is not None:
        import yaml

        if output.absolute() == Path(found.config_file):
            raise ConfigError("this is the file of the sweep", where=output, hint="choose another name")
        config = driving.config_of(found, first["values"], ["budget=null"])
        data = config.model_dump(mode="json", exclude_defaults=True)
        try:
            output.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the file cannot be written: {error.strerror}", where=output) from error
        without = "" if found.limit_micro is None else "; without a budget: the sweep's is for all trials together"
        say(f"wrote {output}{without}")
    if as_json:
        print_json({"sweep": found.id, "metric": shown["metric"], **first})
        return 0
    value = overview.figure(first["value"])
    lines = [f"trial {first['trial']} of {found.id}: {shown['metric']} {value} at {overview.place_of(shown, first)}"]
    lines += [f"  {key}: {value}" for key, value in first["values"].items()]
    print_text([*lines, f"  its job: {first['job']}"])
    return 0
