"""Model folders: the files that `cloudtrain export` writes, and that serve, push and fine-tuning read.

    model.safetensors          or model-00001-of-0000N.safetensors with model.safetensors.index.json
    model.pt2, model.onnx      if the model could be traced
    config.json, code/         the params and the task, to build the model again
    check.json, README.md      the result of the check, the model card
    SHA256SUMS                 every other file; SHA256SUMS.sig is a signature by ssh-keygen, if asked for

`folder` verifies a folder, `order` is the message that asks for an export, `scratch` has the files of an unfinished
export, `tensors` writes and reads the weights, `calls` describes the arguments of the model. Only the last needs torch.
"""
