"""The config's keys below `sweep`: a search over values of other keys of the same file."""

from typing import Any, Literal

from pydantic import Field

from .kinds import Section, Text


class Sweep(Section):
    """A search over values of other keys: many trials within one budget."""

    space: dict[Text, Any] = Field(
        min_length=1,
        description="Keys of this file, each with its values: `{uniform: [0, 0.3]}`, `{log: [1e-5, 1e-1]}`, "
        "`{int: [16, 256], log: true}`, or a list of choices. A range of a grid needs `points`.",
        examples=[{"training.optimizer.lr": {"log": [1e-5, 1e-1]}, "training.optimizer.name": ["adamw", "lamb"]}],
    )
    algorithm: Literal["grid", "random", "halving", "asha", "pbt"] = Field(
        "asha",
        description="grid and random train each trial to the end. asha pauses trials at rungs, and lets the best "
        "1/factor of a rung go on; halving first waits for all trials of a rung, so its result does not depend on the "
        "order of ends. pbt: after each generation the lowest quarter continues from copies of the highest quarter, "
        "with changed values.",
        examples=["halving"],
    )
    metric: Text | None = Field(
        None, description="Metric of the evaluation. Default: training.monitor's.", examples=["accuracy"]
    )
    mode: Literal["min", "max"] | None = Field(
        None,
        description="Whether less of the metric is better, or more. Default: training.monitor's.",
        examples=["max"],
    )
    trials: int | None = Field(
        None, ge=1, le=10_000, description="Trials in all. Default: a grid's size, else 27.", examples=[81]
    )
    parallel: int | None = Field(
        None, ge=1, le=1000, description="Trials at once. Default: all slots of a packed sweep, else 4.", examples=[8]
    )
    place: Literal["packed", "jobs"] | None = Field(
        None,
        description="packed: one job, whose machines train the trials side by side. jobs: each trial is a job of its "
        "own. Default: packed for a task with `max_steps` or `epochs` and a script with `steps`, else jobs.",
        examples=["jobs"],
    )
    slots: int = Field(
        1, ge=1, le=64, description="GPUs of a trial, of one instance; without GPUs: ranks (packed).", examples=[2]
    )
    keep: int = Field(
        5, ge=1, description="Trials whose checkpoints stay after the end of a packed sweep.", examples=[1]
    )
    steps: int | None = Field(
        None,
        ge=1,
        le=1_000_000_000,
        description="Steps of a whole training of a `script` or `module`, as the program prints steps. A task has "
        "`training.max_steps`.",
        examples=[3000],
    )
    first_rung: int | None = Field(
        None,
        ge=1,
        description="Steps of the first segment, of a generation for pbt; epochs for a training in `epochs`. Default: "
        "the whole training / 81 (pbt: / 20), and at least `eval_every`.",
        examples=[200],
    )
    factor: int = Field(
        3, ge=2, le=10, description="Each rung has so many times the steps of the rung before.", examples=[4]
    )
    seed: int = Field(0, ge=0, description="Seed of the trials' values.", examples=[1])
