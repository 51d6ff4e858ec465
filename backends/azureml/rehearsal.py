"""A rehearsal of the command job on this machine: each node's command, its variables, and its mounted folders.

The node's environment follows reports of users and Azure's public examples, seen in 2026; Azure documents little of it.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

from cloudtrain.entrypoints.contract import ContainerOrder
from cloudtrain.launcher.backend import Request
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.rehearsal.stage import NodeRun, Rehearsal, Stage

from .request import BUNDLE, CHECKPOINTS, ORDER, SENT, encoded

GRACE_S = 30.0  # as for any container; Azure documents no time from a low-priority machine's notice to its end
DONE, SAVED = 0, 75  # exit codes of entrypoints/container/container.py
MASTER_PORT = "6105"
_PLACEHOLDER = re.compile(r"\$\{\{\s*(inputs|outputs)\.(\w+)\s*\}\}")


def rehearsal(request: Request, stage: Stage) -> Rehearsal:
    """Prepare the nodes. Raises ConfigError if `raw` has added an unknown reference to the command."""
    body = request.body
    home = f"/mnt/azureml/cr/j/{request.name}"
    data = {name: f"{home}/cap/data-capability/wd/{name}" for name in (*body.get("inputs", {}), *body["outputs"])}
    given = ContainerOrder.load(json.loads(base64.b64decode(body["environment_variables"][ORDER])))
    mounted = {data[name]: _made(stage.kept / name) for name in body["outputs"]}
    for name, entry in body.get("inputs", {}).items():
        mounted[data[name]] = stage.inputs.get(name) or _empty(stage.kept / "inputs" / name, entry["type"])
    job, mirrored = stage.with_own_mirror(given.job)
    order = replace(given, job=job, secrets=None)
    nodes = []
    for number in range(len(stage.addresses)):
        disk = stage.folder / f"node-{number}"
        work = _made(disk / "azureml" / Path(home).relative_to("/mnt/azureml") / "exe/wd")
        shutil.copyfile(stage.bundle.path, work / BUNDLE)
        own = {} if stage.has_own_places else {"/tmp/cloudtrain": _made(disk / "unpacked")}
        nodes.append(
            NodeRun(
                hostname=f"node-{number}",
                argv=("bash", "-c", _resolved(body["command"], data)),
                env=_environment(request, order, data, stage, number),
                agents=(work / "cloudtrain",),
                places={"/mnt/azureml": disk / "azureml", **mounted, **own, **mirrored},
                cwd=f"{home}/exe/wd",
                names={f"node-{other}": address for other, address in enumerate(stage.addresses)},
            )
        )
    shared = stage.kept / CHECKPOINTS if CHECKPOINTS in body["outputs"] else stage.kept / "mirror" / order.job.job
    environment = body.get("environment")
    if isinstance(environment, dict):
        environment = environment.get("image", "of its own")
    return Rehearsal(
        tuple(nodes),
        notice="SIGTERM to every node, SIGKILL after 30 s, for Azure documents no time; the job is begun again",
        grace_s=GRACE_S,
        checkpoints=shared,
        codes={"done": DONE, "interrupted": SAVED},
        replaced=(
            "blob storage: the mounted outputs are folders here",
            f"the environment {environment}",
            *(["the key vault"] if given.secrets else []),
        ),
    )


def _resolved(command: str, data: dict[str, str]) -> str:
    """Return the command as the service passes it to a shell."""

    def place(found: re.Match[str]) -> str:
        if found[2] not in data:
            message = f"the command names {found[0]}, and there is no such input or output"
            raise ConfigError(message, where="azureml.raw", hint="leave the command as it is rendered")
        return data[found[2]]

    return _PLACEHOLDER.sub(place, command)


def _environment(
    request: Request, order: ContainerOrder, data: dict[str, str], stage: Stage, number: int
) -> dict[str, str]:
    body, nodes = request.body, len(stage.addresses)
    return {
        **stage.container_variables(number, f"node-{number}", stage.folder / f"node-{number}"),
        "AZUREML_RUN_ID": request.name,
        "AZUREML_ROOT_RUN_ID": request.name,
        "AZUREML_EXPERIMENT_NAME": str(body.get("experiment_name", "")),
        "AZUREML_NODE_COUNT": str(nodes),
        "AZUREML_CR_NODE_RANK": str(number),
        **{f"AZURE_ML_OUTPUT_{name}": data[name] for name in body["outputs"]},
        **{f"AZURE_ML_INPUT_{name}": data[name] for name in body.get("inputs", {})},
        "MASTER_ADDR": stage.addresses[0],
        "MASTER_PORT": MASTER_PORT,
        "WORLD_SIZE": str(nodes),
        "NODE_RANK": str(number),
        "RANK": str(number),
        "LOCAL_RANK": "0",
        **{name: str(value) for name, value in body["environment_variables"].items()},
        ORDER: encoded(order.dump()),
        SENT: encoded({"token": request.name}),
        **stage.secrets,
        **stage.variables,
    }


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _empty(path: Path, kind: str) -> Path:
    """Return a placeholder for an input that does not exist here: an empty folder, or an empty file."""
    if kind != "uri_file":
        return _made(path)
    _made(path.parent)
    path.touch()
    return path
