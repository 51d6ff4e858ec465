"""Commands and options of foreign tools, with the command line of cloudtrain; imported for an unknown word only."""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path, PurePath
from shlex import join, quote

from ..backend_table import BUILT_IN, traits
from ..errors import CloudtrainError
from . import DEFAULT_FILE, fields, written
from .foreign_keys import entries, our_keys

# A command here: the foreign commands; rows have a semicolon or a line between them.
# Of the user's own words `?` is the first, `*` all, `+` all or `JOB`, `.` a file.
_COMMANDS = """
submit .: start launch up apply create train run-job sbatch srun qsub fit go schedule estimator; submit --spot .: spot
submit . (a sweep is the section `sweep` of the config, docs/sweeps.md): sweep sweeps tune hpo search agent
submit --dry-run .: dryrun dry-run manifest; plan .: estimate optimize preview; validate .: lint verify test
stop *: down terminate scancel qdel abort shutdown pause suspend; stop --now *: kill; rm +: delete del remove destroy
list: jobs job squeue sacct qstat ls history get runs experiment experiments exp e trials apps app
list (`submit --queue` waits in line, `hosts` shows the machines): queue; watch *: top htop monitor
explain limits (machines live as long as the job): autostop autodown
watch (`watch` sends alerts while jobs run, and `notify` sends a test alert): alert alerts; compare *: diff
status *: describe show info inspect events state stat scontrol
logs ?: log output; logs -f ?: attach tail follow stream
artifacts ?: download pull fetch cp scp rsync; exec +: shell connect; ui: dashboard tensorboard tb web; evaluate +: eval
cost: cost-report costs billing usage; prices: show-gpus gpus machines instance-types offers; export +: convert deploy
hosts: nodes node sinfo nvidia-smi cluster clusters fleet; backends: clouds cloud providers infra; explain: config keys
report ?: curves plot; explain inputs: volume volumes storage bucket data dataset; explain secrets: secret secrets
doctor: login auth check configure setup; init: new scaffold; resume +: restart continue retry requeue relaunch rerun
rehearse .: debug simulate; completion: completions autocomplete; --version: version upgrade update
"""
# A key of the config, or what to type: the foreign options; `COMMAND.OPTION` is of that command alone.
_OPTIONS = """
resources.accelerators: gpus gpu num_gpus gpus_per_node gpus_per_task gres G slots slots_per_trial; env.NAME: e
--instance-type NAME: cpus memory; training.global_batch_size: batch_size; slurm.partition: p; slurm.mem: mem
resources.instances: N; slurm.cpus_per_node: cpus_per_task; ssh.hosts: host hosts; ssh.user: user
distributed.nproc_per_node: n ntasks; limits.max_duration: t time timeout max_run; --dry-run: dryrun
cloudtrain submit *: entrypoint entry_point; cloudtrain selftest *: selftest.backend; resources.spot: spot_instances
inputs.data: data input inputs volume mount; outputs.model: output_path; code.dir: workdir
backend: cloud infra provider context; cloudtrain submit --name *: submit.J submit.c submit.cluster submit.cluster_name
-d: detach_run async background no_wait no_follow; --queue: r retry_until_up; --now: stop.force stop.f; -y: rm.force
leave it out, machines live as long as the job: down rm autodown autostop i idle_minutes_to_autostop
leave it out, a sweep is the section `sweep` of the config (docs/sweeps.md): array
leave it out, the hosts are a list in the config, ssh.hosts (docs/ssh.md): hostfile
leave it out, `cloudtrain wait JOB && cloudtrain submit` keeps the order: dependency
cloudtrain submit -- accelerate launch --num_processes * train.py: num_processes
leave it out, `submit` follows the log: follow wait watch stream_logs it; --tail *: logs.lines logs.l
-f *: config config_file; cloudtrain watch: status.watch status.w status.follow list.watch list.w list.follow
"""
_TOOLS = ("sky", "dstack", "torchx", "det", "modal", "aws", "az", "gcloud", "kubectl", "ray")
_TYPED = {"budget.limit": "--budget", "backend": "--backend"} | {  # keys with an option of their own
    f"resources.{key}": f"--{key.replace('_', '-')}" for key in ("instances", "accelerators", "instance_type", "spot")
}


def _by_name(table: str) -> dict[str, str]:
    return {name: ours for ours, names in entries(table.replace("; ", "\n")).items() for name in names.split()}


def command_line(args: list[str], own: Collection[str]) -> str:
    """Return cloudtrain's command line for a foreign one; an empty text if it is unknown. `own`: our commands."""
    word, *rest = args
    templates = _by_name(_COMMANDS)
    if re.fullmatch(r"python[\d.]*|torchrun|accelerate", word):
        return join(["cloudtrain", "submit", "--", *args])
    if rest and word in _TOOLS:
        return command_line(rest, own)
    if word in templates and rest and rest[0] != word and (rest[0] in own or rest[0] in templates):
        return command_line(rest, own)  # `jobs logs 3`
    if word in own:
        return join(["cloudtrain", *args])
    files = [each for each in args if PurePath(each).suffix in (".py", ".yaml", ".yml")]
    template, _, note = templates.get(word, "submit ." if word in files else "").partition(" (")
    jobs = [each for at, each in enumerate(rest) if not any(word.startswith("-") for word in rest[: at + 1])]
    marked = {"?": jobs[:1], "*": jobs, "+": jobs or ["JOB"], ".": files[:1]}
    line = [each for part in template.split() for each in marked.get(part, [part])]
    return f"{join(['cloudtrain', *line])}{f' ({note}' if note else ''}" if line else ""


def instead(args: list[str], own: Collection[str]) -> str:
    """Return the end of the message on an unknown command: the command line here, or the close match."""
    if line := command_line(args, own):
        return f"; here: {line}"
    close = get_close_matches(args[0], [*own], 1)
    return f".{f' Did you mean `{close[0]}`?' if close else ''}"


def option_line(command: str, option: str, argv: list[str], known: Collection[str]) -> str:
    """Return what to type for an unknown option of a command; an empty text if no table has the option.

    `known`: the command's options.
    """
    name, table = option.lstrip("-").replace("-", "_"), _by_name(_OPTIONS)
    typed = re.search(rf"(?:^|\0){re.escape(option)}[=\0]?([^\0]*)", "\0".join(argv))
    value = typed[1] if typed and not typed[1].startswith("-") else ""
    template = table.get(f"{command}.{name}") or (table.get(name, "") if "--set" in known else "")
    if template.partition(" ")[0] in (*known, "leave", "cloudtrain"):
        return template.replace("*", quote(value or ("NAME" if "--set" in known else "10")))
    if "--set" not in known:
        return ""
    value += {"t": "m", "time": "m", "timeout": "s", "max_run": "s"}.get(name, "") * value.isdecimal()
    if name == "args" and "--file" in known:
        return f"cloudtrain {command} -- --epochs 10"
    keys = [key for key in template.split() if "." in key or key in _TYPED]
    keys = keys or fields.keys_named(name) or [key for key in [our_keys().get(name, "")] if key]
    if name in ("region", "zone", "location"):
        keys = [f"{each}.{key}" for each in BUILT_IN for key in traits(each).siblings if key in ("region", "location")]
    is_own = all(key.startswith("training") or name == "data" for key in keys)
    is_own = is_own and bool(keys or not get_close_matches(option, known))
    if is_own and "--file" in known and _is_of_script(argv):
        return join(["--", option, *filter(None, [value])])
    words, block = (
        " or ".join(_setting(key, value, known) for key in keys[:3]),
        keys[0].partition(".")[0] if keys else "",
    )
    return f"--backend {block} {words}" if len(keys) == 1 and block in BUILT_IN and "--backend" not in argv else words


def _is_of_script(argv: list[str]) -> bool:
    """Return whether the command line names a script, or a config without a task."""
    file = Path(next((word for word in argv if word.endswith((".yaml", ".yml"))), DEFAULT_FILE))
    with suppress(CloudtrainError):
        return any(word.endswith(".py") for word in argv) or written(file, ("task",)) is None
    return False


def _setting(key: str, value: str, known: Collection[str]) -> str:
    """Return what sets the key to the value, or to the key's example."""
    value = re.sub(r"^(\d+d)?(\d+):(\d\d):\d\d$", r"\1\2h\3m", re.sub(r"^(\d+)-(?=\d+:)", r"\1d", value))  # of Slurm
    if key in ("env", "env.NAME"):
        value = value if "=" in value else f"{value or 'NAME'}=VALUE"
        return f"--set {quote(f'env.{value}')}"
    if key == "resources.accelerators":
        value = re.sub(r"^(?=\d+$)", "TYPE:", value.removeprefix("gpu:"))  # Slurm writes gpu:a100:4
    if key == "inputs.data" and re.match(r"\w+=", value):
        key, value = f"inputs.{value.partition('=')[0]}", value.partition("=")[2]
    if key == "backend":
        value = next((name for name in BUILT_IN if value in (name, *traits(name).aliases)), "")
    if (field := fields.field_at(tuple(key.split(".")))) and isinstance((field.examples or [""])[0], list) and value:
        value = f"[{value}]"
    if not value and field:
        value = fields.as_yaml((field.examples or ["VALUE"])[0])
    option = _TYPED.get(key)
    words = "--spot" if option == "--spot" else f"{option} {quote(value)}"
    return words if option in known else f"--set {quote(f'{key}={value}')}"
