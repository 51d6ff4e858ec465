"""The table of backends: the name of each backend, its class, and its facts for the launcher.

Further packages register backends in the entry-point group `cloudtrain.backends` (name -> `module:Class`), in addition
to the built-in backends, never in their place. The package of a backend's module has the facts as `TRAITS`, and imports
no further module.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pydantic import BaseModel

GROUP = "cloudtrain.backends"
BUILT_IN = {
    "local": "cloudtrain.backends.local.backend:LocalBackend",
    "ssh": "cloudtrain.backends.ssh.backend:SshBackend",
    "slurm": "cloudtrain.backends.slurm.backend:SlurmBackend",
    "sagemaker": "cloudtrain.backends.sagemaker.backend:SageMakerBackend",
    "azureml": "cloudtrain.backends.azureml.backend:AzureMLBackend",
    "vertex": "cloudtrain.backends.vertex.backend:VertexBackend",
}
# An example of an input's place for each backend, where the input's name is NAME.
PLACES = {
    "local": "data/NAME",
    "ssh": "/data/NAME",
    "slurm": "/scratch/me/NAME",
    "sagemaker": "s3://BUCKET/NAME/",
    "azureml": "https://ACCOUNT.blob.core.windows.net/CONTAINER/NAME/",
    "vertex": "gs://BUCKET/NAME/",
}
DEFAULT = next(iter(BUILT_IN))
SERVING = "sagemaker, azureml or vertex"  # backends that are `Serves`, for texts
ALL, CHEAPEST = "all", "cheapest"  # instead of the name of a backend


@dataclass(frozen=True)
class BackendTraits:
    """The facts about a backend, as data for the launcher, with defaults for a plug-in without facts.

    `block` is the dotted name of the model of the config's block, with a `help` text and an `example`. In the block:
    `foreign_keys` and `siblings` map a key to the names of the same setting in similar tools and in further blocks,
    with spaces between; two `exclusive` keys exclude each other; `code_files` are keys that name a file of the code
    folder.

    `aliases`: wrong spellings of the backend's name, and names of the vendor. `runs_here`: the nodes are processes of
    this machine. `keeps_on_nodes`: checkpoints lie on the nodes' own disks, without a `checkpoint.uri`.
    `queues`: the platform takes a job without machines for it, and the job waits there.
    `sizes_disks`: the request has a field for `resources.disk_gb`. `derives_spot_prices`: no spot price in the price
    table comes from a vendor's list. `own_machines`: YAML with machines of the user, for the command `hosts`.
    `data_place`: where local data of `inputs` is copied to, in words; empty if the backend copies none. `data_copy`:
    the vendor's command for larger data, with {path} and {name}.
    `data_usd`: the price of a GB there for a month.
    `programs`: needed programs of this machine, each with the option that prints the version.
    """

    block: str = ""
    help: str = ""
    example: Mapping[str, Any] = field(default_factory=dict)
    foreign_keys: Mapping[str, str] = field(default_factory=dict)
    siblings: Mapping[str, str] = field(default_factory=dict)
    exclusive: tuple[tuple[str, str], ...] = ()
    code_files: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    runs_here: bool = False
    keeps_on_nodes: bool = False
    queues: bool = False
    sizes_disks: bool = False
    derives_spot_prices: bool = False
    own_machines: str = ""
    data_place: str = ""
    data_copy: str = ""
    data_usd: float = 0.0
    programs: Mapping[str, str] = field(default_factory=dict)


def names() -> list[str]:
    """Return the names of the usable backends: the built-in backends, then plug-ins."""
    return [*BUILT_IN, *sorted(set(plugins()) - set(BUILT_IN))]


def class_of(name: str) -> str | None:
    """Return `module:Class` of a backend, None for an unknown name."""
    return BUILT_IN.get(name) or plugins().get(name)


def package_of(name: str) -> str | None:
    """Return the package of a backend's module, None for an unknown name."""
    module = (class_of(name) or "").partition(":")[0]
    return module.rpartition(".")[0] or module or None


def traits(name: str) -> BackendTraits:
    """Return the facts about a backend; the defaults for an unknown name."""
    package = package_of(name)
    found: BackendTraits = getattr(importlib.import_module(package or __name__), "TRAITS", BackendTraits())
    return found


def block_of(name: str) -> type[BaseModel] | None:
    """Return the model of a backend's block in the config; None for a backend without a block."""
    module, _, kind = traits(name).block.rpartition(".")
    return cast("type[BaseModel]", getattr(importlib.import_module(module), kind)) if kind else None


def similar(name: str) -> str:
    """Return the advice for an unknown backend's name: the meant backend, else all names."""
    from difflib import get_close_matches

    meant = {spelling: known for known in names() for spelling in (known, *traits(known).aliases)}
    close = get_close_matches(name.lower(), meant, 1, 0.75)
    return f"did you mean `{meant[close[0]]}`?" if close else f"there are: {', '.join(names())}"


def plugins() -> dict[str, str]:
    """Return the classes of installed plug-ins by name. The search reads the files of every installed package."""
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=GROUP)}
