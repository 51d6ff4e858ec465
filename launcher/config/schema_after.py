"""The config's keys for another job's weights and for the test; on the nodes they are in entrypoints/contract.py."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from .kinds import CheckpointChoice, Many, NamePattern, Section, Shorthand, SplitName, Text


class InitFrom(Section):
    """The weights of the first step, from another job or a file. The job's own checkpoints always win."""

    job: Text | None = Field(
        None, description="The parent: a job's id or name. Exactly one of `job` and `path`.", examples=["digits"]
    )
    checkpoint: CheckpointChoice | None = Field(
        None,
        description="Which checkpoint: best, last or step-N. Default: the best where one is kept, else the last.",
        examples=["best", "step-200"],
    )
    path: Text | None = Field(
        None,
        description="A checkpoint's folder, a folder with model.safetensors (or its index, or model.pt), or a file, "
        "on the job's machine; on the clouds a uri of the platform's storage.",
        examples=["s3://bucket/export/"],
    )
    load: Literal["weights", "weights+optimizer"] = Field(
        "weights",
        description="weights: those that were evaluated, so the average's where `ema_decay` was set, with a fresh "
        "optimizer. weights+optimizer: the trained weights and the optimizer's state. Step, schedule and sample order "
        "begin anew in both.",
        examples=["weights+optimizer"],
    )
    rename: dict[NamePattern, str] = Field(
        {},
        description="Regular expression -> replacement, applied to the parent's names, in this order.",
        examples=[{"^backbone\\.": "encoder."}],
    )
    skip: Many[NamePattern] = Field(
        (),
        description="Regular expressions that find names: these weights are not loaded, and begin as `model` does.",
        examples=[["^head\\."]],
    )
    strict: bool = Field(
        True,
        description="Every weight of the model is found, and every weight of the parent is used. With false, names of "
        "one side are left out and named in the log; a different shape is always refused.",
        examples=[False],
    )


def _init_from(value: Any) -> Any:
    """Return text as a mapping: a path or uri if the text has a slash, else a job with an optional `@checkpoint`.

    Raises ValueError for a text that is neither.
    """
    if isinstance(value, dict | BaseModel | None):
        return value
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a job such as `digits` or `digits@best`, or a mapping of `job` or `path`")
    if "/" in value or value.endswith((".safetensors", ".pt")):
        return {"path": value}
    job, at, checkpoint = value.partition("@")
    if at and not re.fullmatch(r"best|last|step-[0-9]{1,12}", checkpoint):
        raise ValueError(f"best, last or a step such as step-200 after `@`, not `{checkpoint}`")
    return {"job": job, **({"checkpoint": checkpoint} if at else {})}


InitFromOrText = Annotated[InitFrom, Shorthand("text", _init_from, {"type": "string"})]


class Evaluate(Section):
    """The test of a task: figures on a split that has chosen nothing (docs/evaluate.md)."""

    split: SplitName = Field("test", description="The split's name: `dataset(params, split)`.", examples=["test"])
    checkpoint: Literal["best", "last"] | None = Field(
        None,
        description="Whose figures are the job's: default the best where one is kept, else the last. The other is "
        "reported beside.",
        examples=["best"],
    )
    at_end: bool = Field(True, description="Test after the last step, on the job's own machines.", examples=[True])
    batch_size: int | None = Field(
        None,
        ge=1,
        description="Samples of a forward pass, on any number of ranks. Default: micro_batch_size, else 32.",
        examples=[64],
    )
    predictions: int = Field(
        0,
        ge=0,
        le=100_000,
        description="Write the predictions of so many samples, the first by index, to predictions-SPLIT.jsonl.gz.",
        examples=[1000],
    )
    only: bool = Field(
        False,
        description="Test the weights of `init_from`, and train nothing; `cloudtrain evaluate` sets it.",
        examples=[True],
    )
