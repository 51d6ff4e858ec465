"""ModelService: uploads of models and their versions, on the client's own message classes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from google.cloud.aiplatform_v1 import types
from google.longrunning import operations_pb2

from doubles.google.calls import Call
from doubles.google.errors import GoogleError, invalid
from doubles.google.names import NUMBER

if TYPE_CHECKING:
    from doubles.google.world import World

_ID = re.compile(r"[a-z0-9_][a-z0-9_-]{0,62}")
_ALIAS = re.compile(r"[a-z][a-zA-Z0-9-]{0,126}[a-z0-9]")


def upload(world: World, call: Call, request: Any) -> Any:
    """Make a model, or a version of a model; the answer is an operation that ends later."""
    asked = request.model
    name = request.parent_model.rpartition("/")[2] or request.model_id
    if not asked.display_name or (asked.artifact_uri and not asked.container_spec.image_uri):
        raise invalid("List of found errors:\t1.Field: model; Message: display_name and image_uri are required.")
    if not _ID.fullmatch(name) or any(not _ALIAS.fullmatch(alias) for alias in asked.version_aliases):
        raise invalid("List of found errors:\t1.Field: model_id; Message: The id or an alias is invalid.")
    with world.lock:
        versions = world.models.get(name)
        if request.model_id and versions:
            raise GoogleError("ALREADY_EXISTS", f"Model {name} already exists.")
        if request.parent_model and not versions:
            raise GoogleError("NOT_FOUND", f"Model {request.parent_model} does not exist.")
        versions = world.models.setdefault(name, [])
        for each in versions:  # an alias moves to the newest version
            kept = [alias for alias in each.version_aliases if alias not in asked.version_aliases]
            del each.version_aliases[:]
            each.version_aliases.extend(kept)
        made = type(asked)()
        made.CopyFrom(asked)
        made.name, made.version_id = f"{request.parent}/models/{name}", str(len(versions) + 1)
        versions.append(made)
        region = request.parent.rpartition("/")[2]
        operation = f"projects/{NUMBER}/locations/{region}/models/{name}/operations/{len(versions)}"
        world.uploads[operation] = (made.name, made.version_id)
    return operations_pb2.Operation(name=operation)


def get(world: World, call: Call, request: Any) -> Any:
    """Return a model, its version `@ID`, or the version with an alias."""
    name, _, wanted = request.name.rpartition("/")[2].partition("@")
    found = [
        each for each in world.models.get(name, ()) if not wanted or wanted in (each.version_id, *each.version_aliases)
    ]
    if not found:
        raise GoogleError("NOT_FOUND", f"The Model {request.name} does not exist.")
    return found[-1]


def get_operation(world: World, call: Call, request: Any) -> Any:
    """Return the operation, which has ended."""
    if request.name not in world.uploads:
        raise GoogleError("NOT_FOUND", f"Operation {request.name} does not exist.")
    name, version = world.uploads[request.name]
    done = operations_pb2.Operation(name=request.name, done=True)
    done.response.Pack(types.UploadModelResponse.pb()(model=name, model_version_id=version))
    return done
