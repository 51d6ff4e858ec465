"""Makes once for all warm commands what each would make: the schema of a config with each block, compiled templates.

A command makes them in 0.1 s of processor time.
"""

from collections import Counter
from importlib.resources import files

from pydantic import BaseModel

from cloudtrain.launcher.config import schema
from cloudtrain.launcher.planning import render

for blocks in ((), *((name,) for name in schema.BUILT_IN)):
    schema.model_of(blocks).model_rebuild()
unfinished = BaseModel.__subclasses__()
while unfinished:
    model = unfinished.pop()
    unfinished += model.__subclasses__()
    if model.__module__.startswith("cloudtrain."):
        model.model_rebuild()
for folder in schema.BUILT_IN:
    for file in files("cloudtrain.templates").joinpath(folder).iterdir():
        render._environment().get_template(f"{folder}/{file.name}")
for words in ([], (word for word in ())):  # the first of each type asks every class of every SDK
    Counter(words)
