"""`cloudtrain notify`: test the channels of a config."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from ..text.terminal import print_json, print_lines, say
from .options import Overrides, config_command, config_options, json_option


@config_command("notify")
@config_options
@json_option
def command(overrides: Overrides, as_json: bool) -> int:
    """Send a trial message to each place of the config's `notify`; exit code 1 where one does not take it."""
    from cloudtrain.entrypoints.notices.facts import JobFacts
    from cloudtrain.entrypoints.notices.message import compose
    from cloudtrain.entrypoints.notices.sending import try_all

    from ..channels import entries
    from ..notices.delivery import deliver

    config = overrides.load()
    found = entries(config.model_dump(mode="json", include={"notify"}))
    if not found:
        say("the config has no `notify`: no alerts are sent\n  hint: cloudtrain explain notify")
        return 0
    now_s = time.time()
    facts = JobFacts(config.name, config.backend, attempt=1, state="pending")
    notice = compose(f"trial:{now_s}", "trial", "a trial message; there is nothing to do", facts, now_s)
    faults = try_all([partial(deliver, entry, notice) for entry in found])
    results = [
        {"channel": entry.shown, "told": fault is None, "why": fault and fault.message, "cure": fault and fault.cure}
        for entry, fault in zip(found, faults, strict=True)
    ]
    if as_json:
        print_json(results)
    else:
        print_lines([_line(each) for each in results])
    return int(any(fault is not None for fault in faults))


def _line(result: Mapping[str, object]) -> str:
    cure = f"  ({result['cure']})" if result["cure"] else ""
    return f"ok    {result['channel']}" if result["told"] else f"fail  {result['channel']}: {result['why']}{cure}"
