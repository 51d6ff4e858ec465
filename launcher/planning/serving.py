"""The files that a vendor's own command line takes to serve a model: templates, filled in and checked offline.

A value that neither the job's config nor the environment has is a blank, `<NAME>`, which the README lists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..backend.model_files import ServedModel, ServingFiles
from ..errors import Fault, refuse
from . import render, request_rules

PORT = 8080
PLACE = "/srv/model"  # of a model that the image contains
# Of the extra `server` in pyproject.toml, which a test compares: the image has no metadata of cloudtrain.
SERVER = ("starlette>=1,<2", "uvicorn>=0.40,<1")
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # torch without CUDA: a tenth of the size


@dataclass(frozen=True)
class Blank:
    """A value that the user fills in."""

    name: str
    """Written as `<NAME>` in the files."""
    meaning: str
    example: str
    """A value that the vendor's table accepts, for the check."""

    @property
    def mark(self) -> str:
        """The text in the files."""
        return f"<{self.name}>"


@dataclass(frozen=True)
class Vendor:
    """A vendor's requests and their rules."""

    backend: str
    name: str
    shapes: Mapping[str, str]
    """The file of each request -> its shape in rules_serving.json."""
    keys: Mapping[str, str]
    """The path in a request -> the config's key, or the option, that sets the value; longest paths first."""
    blanks: Sequence[Blank]
    growing: str = ""
    """The enumeration that the vendor extends: an unknown word may be newer than the table."""


def rendered(
    vendor: Vendor, model: ServedModel, values: Mapping[str, Any], *, gpus: int, place: str | None
) -> ServingFiles:
    """Return requests, Dockerfile and README. Raises ConfigError for each value that the vendor refuses.

    `gpus`: of the machine. `place`: the model's folder in the image; None if the platform brings the model.
    """
    bodies, files = {}, {}
    for name in vendor.shapes:
        is_json = name.endswith(".json")
        read, written = (render.render_json, render.as_json) if is_json else (render.render_yaml, render.as_yaml)
        bodies[name] = read(f"export/{vendor.backend}/{name}", model=model, port=PORT, **values)
        files[name] = written(bodies[name])
    faults = [fault for name, body in bodies.items() for fault in _faults(vendor, name, body)]
    refuse(fault for fault in faults if not fault.is_warning)
    image = {"packages": [*_torch(model.torch, gpus), *SERVER], "requirements": model.requirements, "port": PORT}
    files["Dockerfile"] = render.render_text("export/Dockerfile", place=place, **image)
    files["serve"] = render.render_text("export/serve", place=place)
    page = f"export/{vendor.backend}/README.md"
    said = "".join([*files.values(), render.render_text(page, model=model, blanks=[], **values)])
    blanks = [blank for blank in vendor.blanks if blank.mark in said]
    files["README.md"] = render.render_text(page, model=model, blanks=blanks, **values)
    return ServingFiles(files, tuple(f"{fault.key}: {fault.message}" for fault in faults))


def _faults(vendor: Vendor, name: str, body: Mapping[str, Any]) -> list[Fault]:
    """Return the breaches of the table by a request, with an example in place of each blank."""
    table = request_rules.read(vendor.backend, name, vendor.name, vendor.growing, file="rules_serving.json")
    text = json.dumps(body)
    for blank in vendor.blanks:
        text = text.replace(blank.mark, blank.example)
    return [
        Fault(f"{name}: {path}: {message}", request_rules.key_of(path, vendor.keys, "name"), is_warning=is_warning)
        for path, message, is_warning in request_rules.violations(table, json.loads(text), vendor.shapes[name])
    ]


def _torch(version: str | None, gpus: int) -> list[str]:
    """Return pip's words for torch in the version of the export, whose traced model no older version reads."""
    if version is None:
        return ["torch"]
    plain = version.partition("+")[0]
    return [f"torch=={plain}"] if gpus else ["--extra-index-url", _CPU_INDEX, f"torch=={plain}+cpu"]
