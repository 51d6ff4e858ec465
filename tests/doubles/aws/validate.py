"""Check an operation's parameters against the vendor's own model (botocore's data), with AWS's error messages.

botocore itself checks types and required members only; `check` adds lengths, ranges, patterns, enumerations and unknown
members, and `check_rules` the rules between fields of CreateTrainingJob that are missing in the model.
"""

import functools
import re
import sys
import unicodedata
from collections.abc import Iterator
from typing import Any

from doubles.aws.wire import AwsError

_TYPES: dict[str, tuple[type, ...]] = {
    "structure": (dict,),
    "map": (dict,),
    "list": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "long": (int,),
    "double": (int, float),
    "float": (int, float),
    "timestamp": (int, float, str),
}
MAX_S = 28 * 86_400
Request = dict[str, Any]
# Families named in botocore's text on VolumeSizeInGB and EC2's list of instance stores, with and without local disks.
_LOCAL_DISK = re.compile(r"ml\.(g4dn|g5|g6|g6e|p4d|p4de|p5|p5e|p5en|trn1|trn1n|trn2|m5d|c5d|r5d)\.")
_REGISTRY = re.compile(r"\d{12}\.dkr\.ecr(-fips)?\.(?P<region>[a-z0-9-]+)\.(?P<suffix>[a-z.-]+)")
_NAME = re.compile(r"[a-z0-9]+([._/-]+[a-z0-9]+)*(:[\w][\w.-]{0,127})?(@sha256:[0-9a-f]{64})?")
_NO_LOCAL_DISK = re.compile(r"ml\.(m4|m5|c4|c5|p2|r5|t3)\.")


def check(service: str, operation: str, params: Any) -> None:
    """Raise AwsError with all faults of the parameters."""
    model = _model(service)
    if operation not in model["operations"]:
        raise AwsError("UnknownOperationException", f"{service} has no {operation}")
    shape = model["operations"][operation].get("input")
    if shape is None:
        return
    wrong_type = next(_wrong_types(model, shape["shape"], params), None)
    if wrong_type is not None:
        raise AwsError("SerializationException", wrong_type)
    found = list(_violations(model, shape["shape"], params, ""))
    if found:
        plural = "" if len(found) == 1 else "s"
        code = "InvalidParameterException" if service == "logs" else "ValidationException"
        raise AwsError(code, f"{len(found)} validation error{plural} detected: {'; '.join(found)}")


def enumeration(service: str, shape: str) -> list[str]:
    """Return the words of an enumeration."""
    return _model(service)["shapes"][shape]["enum"]


@functools.lru_cache(maxsize=8)
def _model(service: str) -> dict[str, Any]:
    from botocore.loaders import Loader

    return Loader().load_service_model(service, "service-2")


def _wrong_types(model: dict[str, Any], name: str, value: Any) -> Iterator[str]:
    shape = model["shapes"][name]
    kind = shape["type"]
    allowed = _TYPES.get(kind, (object,))
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind != "boolean"):
        was = {bool: "TRUE_VALUE", int: "NUMBER_VALUE", float: "NUMBER_VALUE", str: "STRING_VALUE"}
        yield f"{was.get(type(value), 'Unexpected value')} can not be converted to {kind.capitalize()}"
        return
    for _, inner, item in _items(shape, value, ""):
        yield from _wrong_types(model, inner, item)


def _items(shape: dict[str, Any], value: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield (path, shape's name, value) of each inner value."""
    if shape["type"] == "structure":
        for key, item in value.items():
            if key in shape["members"] and item is not None:
                yield f"{path}.{_lower(key)}".lstrip("."), shape["members"][key]["shape"], item
    elif shape["type"] == "list":
        for number, item in enumerate(value, start=1):
            yield f"{path}.{number}.member", shape["member"]["shape"], item
    elif shape["type"] == "map":
        for key, item in value.items():
            yield f"{path}.{key}.key", shape["key"]["shape"], key
            yield f"{path}.{key}.value", shape["value"]["shape"], item


def _violations(model: dict[str, Any], name: str, value: Any, path: str) -> Iterator[str]:
    shape = model["shapes"][name]
    if shape["type"] == "structure":
        for key in shape.get("required", ()):
            if value.get(key) is None:
                at = f"{path}.{_lower(key)}".lstrip(".")
                yield f"Value null at '{at}' failed to satisfy constraint: Member must not be null"
        for key in value:
            if key not in shape["members"]:  # AWS itself would ignore the member
                yield f"Unknown member '{key}' at '{path or name}'"
    for problem in _problems(shape, value):
        yield f"Value '{value}' at '{path}' failed to satisfy constraint: Member must {problem}"
    for at, inner, item in _items(shape, value, path):
        yield from _violations(model, inner, item, at)


def _problems(shape: dict[str, Any], value: Any) -> Iterator[str]:
    if shape["type"] in ("string", "list", "map"):
        size = len(value)
        if size < shape.get("min", 0):
            yield f"have length greater than or equal to {shape['min']}"
        if size > shape.get("max", sys.maxsize):
            yield f"have length less than or equal to {shape['max']}"
    elif shape["type"] in ("integer", "long", "float", "double"):
        if value < shape.get("min", value):
            yield f"have value greater than or equal to {shape['min']}"
        if value > shape.get("max", value):
            yield f"have value less than or equal to {shape['max']}"
    if "enum" in shape and value not in shape["enum"]:
        yield f"satisfy enum value set: [{', '.join(shape['enum'])}]"
    if "pattern" in shape and not _pattern(shape["pattern"]).fullmatch(value):
        yield f"satisfy regular expression pattern: {shape['pattern']}"


def _lower(key: str) -> str:
    return key[:1].lower() + key[1:]


@functools.lru_cache(maxsize=256)
def _pattern(text: str) -> re.Pattern[str]:
    """Return Java's pattern as Python's; the models use a class such as \\p{L} only inside brackets."""
    text = text.replace(r"\p{Alnum}", "a-zA-Z0-9").replace(r"\p{Alpha}", "a-zA-Z").replace(r"\p{Digit}", "0-9")
    return re.compile(re.sub(r"\\p\{([LMNPSZ])\}", lambda found: _category(found[1]), text))


def _category(letter: str) -> str:
    """Return all characters of a Unicode category, as ranges of a character class."""
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in _categories()[letter])


@functools.lru_cache(maxsize=1)
def _categories() -> dict[str, list[list[int]]]:
    """Return the ranges of characters of each category."""
    found: dict[str, list[list[int]]] = {}
    before = ""
    for code in range(sys.maxunicode + 1):
        letter = unicodedata.category(chr(code))[0]
        if letter == before:
            found[letter][-1][1] = code
        else:
            found.setdefault(letter, []).append([code, code])
            before = letter
    return found


def check_rules(request: Request, region: str | None = None) -> None:
    """Raise AwsError for the first broken rule; the request fits the model already. `region`: of the call, if known."""
    for message in (*_broken(request), *_unpulled(request, region)):
        raise AwsError("ValidationException", message)


def _broken(request: Request) -> Iterator[str]:
    yield from _resources(request["ResourceConfig"])
    yield from _times(request)
    algorithm = request["AlgorithmSpecification"]
    if ("TrainingImage" in algorithm) == ("AlgorithmName" in algorithm):
        yield "You must specify either TrainingImage or AlgorithmName, and not both."
    spot = request.get("EnableManagedSpotTraining", False)
    if spot and "InstancePreferences" in request["ResourceConfig"]:
        yield "InstancePreferences is not supported with EnableManagedSpotTraining."
    if spot and request["ResourceConfig"].get("KeepAlivePeriodInSeconds"):
        yield "KeepAlivePeriodInSeconds is not supported with EnableManagedSpotTraining."
    channels = [channel["ChannelName"] for channel in request.get("InputDataConfig", ())]
    if len(set(channels)) < len(channels):
        yield "Input data channels must have unique names."
    for channel in request.get("InputDataConfig", ()):
        if len(channel["DataSource"]) != 1:
            yield f"The data source of channel {channel['ChannelName']} must have exactly one kind."
    tags = [tag["Key"] for tag in request.get("Tags", ())]
    if len(set(tags)) < len(tags):
        yield "Duplicate tag keys found. Please note that Tag keys are case insensitive."
    if any(tag.lower().startswith("aws:") for tag in tags):
        yield "Tag keys starting with 'aws:' are reserved for system use."
    names = [metric["Name"] for metric in algorithm.get("MetricDefinitions", ())]
    if len(set(names)) < len(names):
        yield "MetricDefinitions must have unique names."


def _unpulled(request: Request, region: str | None) -> Iterator[str]:
    """Yield AWS's answers to images that it does not pull, as public bug reports quote them."""
    algorithm = request["AlgorithmSpecification"]
    image = algorithm.get("TrainingImage")
    if image is None:
        return
    registry, _, name = image.partition("/")
    there = _REGISTRY.fullmatch(registry)
    is_named = _NAME.fullmatch(name if there or "." in registry else image)
    access = algorithm.get("TrainingImageConfig", {}).get("TrainingRepositoryAccessMode")
    if there is None and access != "Vpc" and is_named and "." in registry and not registry.endswith(".amazonaws.com"):
        yield (
            "TrainingImageConfig with TrainingRepositoryAccessMode set to VPC must be provided when using a training "
            "image from a private Docker registry. Please provide TrainingImageConfig and TrainingRepositoryAccessMode "
            "set to VPC when using a training image from a private Docker registry."
        )
    elif (there is None and access != "Vpc") or not is_named:
        yield (
            "Invalid training image. Please provide a valid Amazon Elastic Container Registry path of the Docker image "
            "to run."
        )
    elif access == "Vpc" and "VpcConfig" not in request:
        yield "VpcConfig must be provided when TrainingRepositoryAccessMode is set to Vpc."
    elif there and region and there["region"] != region:
        yield (
            f"Invalid DNS suffix '{there['suffix']}' for region '{there['region']}' in training image. Please provide "
            f"the valid <region>.<dns-suffix>: '{region}.amazonaws.com'"
        )


def _resources(resources: Request) -> Iterator[str]:
    groups = "InstanceGroups" in resources
    single = "InstanceType" in resources or "InstanceCount" in resources
    if groups and single:
        yield "InstanceGroups cannot be specified with InstanceType and InstanceCount."
    if "InstancePreferences" in resources:
        if groups or "InstanceType" in resources or "InstancePlacementConfig" in resources:
            yield "InstancePreferences cannot be specified with InstanceType, InstanceGroups or placement."
        counts = [each.get("InstanceCount") for each in resources["InstancePreferences"]]
        if ("InstanceCount" in resources) == any(counts) or (any(counts) and not all(counts)):
            yield "InstanceCount must be set once: in ResourceConfig, or in every one of InstancePreferences."
        names = [each["InstanceType"] for each in resources["InstancePreferences"]]
        if len(set(names)) < len(names):
            yield "InstancePreferences must have unique instance types."
        if "TrainingPlanArn" in resources and any(
            "TrainingPlanArns" in each for each in resources["InstancePreferences"]
        ):
            yield "TrainingPlanArns of InstancePreferences cannot be specified with TrainingPlanArn."
    elif not groups:
        if "InstanceType" not in resources:
            yield "InstanceType is required in ResourceConfig."
        if "InstanceCount" not in resources:
            yield "InstanceCount is required in ResourceConfig."
    for each in (resources, *resources.get("InstancePreferences", ())):
        kind = each.get("InstanceType", "")
        if "VolumeSizeInGB" not in resources and _NO_LOCAL_DISK.match(kind):
            yield f"VolumeSizeInGB is required in ResourceConfig for {kind}."
        if "VolumeKmsKeyId" in resources and _LOCAL_DISK.match(kind):
            yield f"VolumeKmsKeyId is not supported for {kind}, which has local instance storage."
    if "SelectedInstanceType" in resources or "SelectedInstanceCount" in resources:
        yield "SelectedInstanceType and SelectedInstanceCount are read-only."


def _times(request: Request) -> Iterator[str]:
    stopping = request.get("StoppingCondition", {})
    runtime, wait = stopping.get("MaxRuntimeInSeconds", 86_400), stopping.get("MaxWaitTimeInSeconds")
    if runtime > MAX_S:
        yield f"MaxRuntimeInSeconds must be less than or equal to {MAX_S}."
    if request.get("EnableManagedSpotTraining", False):
        if wait is None:
            yield "MaxWaitTimeInSeconds is required when EnableManagedSpotTraining is true."
        elif wait < runtime:
            yield "MaxWaitTimeInSeconds must be greater than or equal to MaxRuntimeInSeconds."
    elif wait is not None:
        yield "MaxWaitTimeInSeconds is only supported with EnableManagedSpotTraining."
