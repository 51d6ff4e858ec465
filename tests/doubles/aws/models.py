"""SageMaker's registry of models and its endpoints, and EventBridge Scheduler, whose schedules really run.

A schedule runs when a call comes after its time: no caller can see a difference. The setting `clock_s` sets the clock
ahead. Messages that no document states are invented.
"""

from __future__ import annotations

import calendar
import json
import re
import time
from collections.abc import Callable
from typing import Any

from doubles.aws import validate
from doubles.aws.jobs import ACCOUNT
from doubles.aws.wire import AwsError, Call
from doubles.aws.world import World

Params = dict[str, Any]
DELETE = "arn:aws:scheduler:::aws-sdk:sagemaker:deleteEndpoint"
_AT = re.compile(r"at\((\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\)")


def run_due(world: World) -> None:
    """Run the schedules whose time has come. A target that fails is tried again, as often as the schedule says."""
    now_s = time.time() + world.settings.clock_s
    with world.lock:
        for name, told in list(world.shop.schedules.items()):
            if told["at_s"] > now_s or told.get("State") == "DISABLED":
                continue
            tries = 1 + told["Target"].get("RetryPolicy", {}).get("MaximumRetryAttempts", 185)
            told["tried"] = told.get("tried", 0) + 1
            asked = json.loads(told["Target"]["Input"])
            is_done = world.shop.endpoints.pop(asked["EndpointName"], None) is not None
            if (is_done or told["tried"] >= tries) and told.get("ActionAfterCompletion") == "DELETE":
                del world.shop.schedules[name]


def scheduler(world: World, call: Call) -> Params:
    """Return the answer of a call to EventBridge Scheduler. Raises AwsError."""
    validate.check("scheduler", call.operation, call.params)
    run_due(world)
    name, schedules = call.params["Name"], world.shop.schedules
    arn = f"arn:aws:scheduler:{call.region}:{ACCOUNT}:schedule/default/{name}"
    with world.lock:
        if call.operation == "CreateSchedule":
            if name in schedules and schedules[name]["ClientToken"] != call.params["ClientToken"]:
                raise AwsError("ConflictException", f"Schedule {name} already exists.", 409)
            schedules[name] = _checked(call.params)
            return {"ScheduleArn": arn}
        if name not in schedules:
            raise AwsError("ResourceNotFoundException", f"Schedule {name} does not exist.", 404)
        if call.operation == "UpdateSchedule":
            schedules[name] = _checked(call.params)
            return {"ScheduleArn": arn}
        if call.operation == "DeleteSchedule":
            del schedules[name]
            return {}
    if call.operation == "GetSchedule":
        return {"Arn": arn, **{key: value for key, value in schedules[name].items() if key[0].isupper()}}
    raise AwsError("UnknownOperationException", f"the stand-in has no scheduler:{call.operation}")


def _checked(asked: Params) -> Params:
    at, target = _AT.fullmatch(asked["ScheduleExpression"]), asked["Target"]
    if at is None:
        raise AwsError("ValidationException", "Invalid Schedule Expression.")
    if target["Arn"] != DELETE:
        raise AwsError("ValidationException", "the stand-in runs deleteEndpoint alone")
    if not json.loads(target.get("Input", "{}")).get("EndpointName"):
        raise AwsError("ValidationException", "The input lacks EndpointName.")
    return {**asked, "at_s": calendar.timegm(time.strptime(at[1], "%Y-%m-%dT%H:%M:%S"))}


def _create_group(world: World, call: Call) -> Params:
    name = call.params["ModelPackageGroupName"]
    _add(world.shop.groups, name, call.params, f"Model Package Group already exists: {name}")
    return {"ModelPackageGroupArn": _arn(call, "model-package-group", name)}


def _create_package(world: World, call: Call) -> Params:
    asked, name = call.params, call.params["ModelPackageGroupName"]
    with world.lock:
        if name not in world.shop.groups:
            raise AwsError("ValidationException", f"Model Package Group {name} does not exist.")
        if (known := world.shop.tokens.get(asked["ClientToken"])) is not None:
            return {"ModelPackageArn": known}
        packages = world.shop.packages.setdefault(name, [])
        arn = _arn(call, "model-package", f"{name}/{len(packages) + 1}")
        packages.append({**asked, "ModelPackageArn": arn})
        world.shop.tokens[asked["ClientToken"]] = arn
    return {"ModelPackageArn": arn}


def _list_packages(world: World, call: Call) -> Params:
    name = call.params["ModelPackageGroupName"]
    if name not in world.shop.groups:
        raise AwsError("ValidationException", f"Model Package Group {name} does not exist.")
    shown = [
        {
            **{key: each[key] for key in ("ModelPackageGroupName", "ModelPackageDescription", "ModelPackageArn")},
            "ModelPackageVersion": number,
            "CreationTime": time.time(),
            "ModelPackageStatus": "Completed",
        }
        for number, each in enumerate(world.shop.packages.get(name, ()), 1)
    ]
    return {"ModelPackageSummaryList": shown[::-1]}


def _create_model(world: World, call: Call) -> Params:
    name = call.params["ModelName"]
    _add(world.shop.models, name, call.params, f"Cannot create already existing model {name}.")
    return {"ModelArn": _arn(call, "model", name)}


def _create_config(world: World, call: Call) -> Params:
    name = call.params["EndpointConfigName"]
    for variant in call.params["ProductionVariants"]:
        if variant["ModelName"] not in world.shop.models:
            raise AwsError("ValidationException", f"Could not find model {variant['ModelName']}.")
    _add(world.shop.configs, name, call.params, f"Cannot create already existing endpoint configuration {name}.")
    return {"EndpointConfigArn": _arn(call, "endpoint-config", name)}


def _create_endpoint(world: World, call: Call) -> Params:
    name = call.params["EndpointName"]
    if call.params["EndpointConfigName"] not in world.shop.configs:
        raise AwsError("ValidationException", "Could not find endpoint configuration.")
    _add(world.shop.endpoints, name, call.params, f"Cannot create already existing endpoint {name}.")
    return {"EndpointArn": _arn(call, "endpoint", name)}


def _describe_endpoint(world: World, call: Call) -> Params:
    name = call.params["EndpointName"]
    if name not in world.shop.endpoints:
        raise AwsError("ValidationException", f'Could not find endpoint "{_arn(call, "endpoint", name)}".')
    told = {"EndpointName": name, "EndpointArn": _arn(call, "endpoint", name), "EndpointStatus": "InService"}
    return {**told, "CreationTime": time.time(), "LastModifiedTime": time.time()}


def _delete(kind: str, key: str) -> Callable[[World, Call], Params]:
    def delete(world: World, call: Call) -> Params:
        if getattr(world.shop, kind).pop(call.params[key], None) is None:
            raise AwsError("ValidationException", f"Could not find {call.params[key]}.")
        return {}

    return delete


def _add(rows: dict[str, Params], name: str, asked: Params, taken: str) -> None:
    if rows.setdefault(name, asked) is not asked:
        raise AwsError("ValidationException", taken)


def _arn(call: Call, kind: str, name: str) -> str:
    return f"arn:aws:sagemaker:{call.region}:{ACCOUNT}:{kind}/{name}"


ACTIONS: dict[str, Callable[[World, Call], Params]] = {
    "CreateModelPackageGroup": _create_group,
    "CreateModelPackage": _create_package,
    "ListModelPackages": _list_packages,
    "CreateModel": _create_model,
    "CreateEndpointConfig": _create_config,
    "CreateEndpoint": _create_endpoint,
    "DescribeEndpoint": _describe_endpoint,
    "DeleteModel": _delete("models", "ModelName"),
    "DeleteEndpointConfig": _delete("configs", "EndpointConfigName"),
    "DeleteEndpoint": _delete("endpoints", "EndpointName"),
}
