"""What a job runs in: the facts that names tell, the plan's line, and the faults that are found without a pull."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.vertex import request as vertex_request
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.errors import Fault
from cloudtrain.launcher.plan import Runtime
from cloudtrain.launcher.planning import images
from cloudtrain.launcher.planning.prepare import doubts_of_runtime

AWS = "763104351884.dkr.ecr.eu-west-1.amazonaws.com"
NAMES = {
    "docker.io/pytorch/pytorch:2.13.0-cuda12.6-cudnn9-runtime": "Python 3.12, torch 2.13.0, CUDA 12.6, a C compiler",
    "pytorch/pytorch:2.11.0-cuda13.0-cudnn9-devel": "Python 3.12, torch 2.11.0, CUDA 13.0, a C++ compiler",
    "docker://pytorch/pytorch:2.8.0-cuda12.6-cudnn9-devel": "Python 3.11, torch 2.8.0, CUDA 12.6, a C++ compiler",
    "pytorch/pytorch:2.10.0-cuda12.8-cudnn9-runtime": "Python 3.11, torch 2.10.0, CUDA 12.8",
    "pytorch/pytorch:2.8.0-cuda12.6-cudnn9-runtime": "Python 3.11, torch 2.8.0, CUDA 12.6, no C compiler",
    "pytorch/pytorch:1.9.0-cuda11.1-cudnn8-runtime": "Python 3.7, torch 1.9.0, CUDA 11.1",
    f"{AWS}/pytorch:2.13-cu133-amzn2023-sagemaker": "Python 3.12, torch 2.13, CUDA 13.3, a C++ compiler",
    f"{AWS}/pytorch:2.13.0-cpu-amzn2023-sagemaker": "Python 3.12, torch 2.13.0, a C++ compiler",
    f"{AWS}/pytorch-training:2.8.0-gpu-py312-cu129-ubuntu22.04-sagemaker": "Python 3.12, torch 2.8.0, CUDA 12.9",
    f"{AWS}/pytorch-training:1.13.1-cpu-py39-ubuntu20.04-sagemaker": "Python 3.9, torch 1.13.1",
    f"{AWS}/pytorch-training:1.4.0-gpu-py3-cu101-ubuntu16.04": "Python 3.6, torch 1.4.0, CUDA 10.1",
    "public.ecr.aws/deep-learning-containers/pytorch:2.11-cu130-amzn2023-ec2": (
        "Python 3.12, torch 2.11, CUDA 13.0, a C++ compiler"
    ),
    f"{AWS}/pytorch-training:1.13-py38-internal": "Python 3.8",
    "azureml:my-acpt-pytorch-1.13-py38-cuda11.7:1": "Python 3.8",
    "gcr.io/deeplearning-platform-release/huggingface-pytorch-training-cu121.2-3.transformers.4-42.ubuntu2204.py310": (
        "Python 3.10, torch 2.3, CUDA 12.1"
    ),
    f"{AWS}/huggingface-pytorch-training:2.1.0-transformers4.36.0-gpu-py310-cu121-ubuntu20.04": (
        "Python 3.10, torch 2.1.0, CUDA 12.1"
    ),
    "azureml://registries/azureml/environments/acpt-pytorch-2.8-cuda12.6/labels/latest": (
        "Python 3.10, torch 2.10.0, CUDA 12.6"
    ),
    "mcr.microsoft.com/azureml/curated/acpt-pytorch-2.8-cuda12.6:17": "Python 3.10, torch 2.8, CUDA 12.6",
    "azureml:AzureML-ACPT-pytorch-1.12-py39-cuda11.6-gpu:3": "Python 3.9, torch 1.12, CUDA 11.6",
    "azureml:AzureML-pytorch-1.10-ubuntu18.04-py38-cuda11-gpu@latest": "Python 3.8, torch 1.10, CUDA 11",
    "us-docker.pkg.dev/vertex-ai/training/pytorch-gpu.2-4.py310:latest": "Python 3.10, torch 2.4",
    "gcr.io/deeplearning-platform-release/pytorch-cu124.2-4.py310": "Python 3.10, torch 2.4, CUDA 12.4",
    "gcr.io/deeplearning-platform-release/pytorch-gpu.1-6:latest": "Python 3.7, torch 1.6",
    "python:3.8-slim": "Python 3.8",
    "my/train:py3.11-2": "Python 3.11",
    "/opt/py38/bin/python": "Python 3.8",
    "/home/me/.pyenv/versions/3.9.18/bin/python": "Python 3.9",
    "~/.local/share/uv/python/cpython-3.9.18-linux-x86_64-gnu/bin/python": "Python 3.9",
}
UNKNOWN = (
    "nvcr.io/nvidia/pytorch:25.05-py3",
    "pytorch/pytorch:latest",
    "my/copy3:1",
    "python3",
    "azureml://registries/mine/environments/x/versions/38",
    f"{AWS}/pytorch:2.13-cpu-amzn2023-mine",
    "reg/spy38:1",
)


@pytest.mark.parametrize("name", NAMES)
def test_name_tells_the_versions(name: str) -> None:
    """The vendors' names say Python, torch, CUDA and the compiler; the table adds what a name leaves out."""
    assert images.line(images.of(name, "yours")) == f"image: {name} (yours): {NAMES[name]}"


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_name_tells_nothing(name: str) -> None:
    """No fact is guessed from a name that has none."""
    assert images.of(name, "yours") == Runtime(name, "yours")


@pytest.mark.parametrize(
    ("wanted", "torch", "excluded"),
    [
        *(("==2.13.0", (2, 13), False), ("==2.12.0", (2, 13), True), ("===2.12.0", (2, 13), True)),
        *(("==2.8", (2, 8, 1), False), ("==2.8.*", (2, 8, 1), False), ("==2.7.*", (2, 8, 1), True)),
        *(("~=2.8", (2, 13), False), ("~=2.8.0", (2, 13), True), ("~=2.8.0", (2, 8, 1), False)),
        *(("<2.13", (2, 13), True), ("<2.13.1", (2, 13), False), ("<2.14,>=2.6", (2, 13), False)),
        *((">=2.14", (2, 13), True), (">2.13", (2, 13, 0), False), ("<=2.12", (2, 13), True), ("==2", (2, 13), False)),
        *(("!=2.13.0", (2, 13, 0), False), ("==2.13.0+cu130", (2, 13, 0), False), (" >= 3", (2, 13), True)),
    ],
)
def test_bounds_exclude_a_torch_for_certain(wanted: str, torch: tuple[int, ...], excluded: bool) -> None:
    """A version without its last number is excluded only if each of its releases is."""
    assert images._excludes("torch", wanted, torch) is excluded


def found(folder: Path, runtime: Runtime, text: str = "", *, gpus: int = 8, **files: str) -> list[Fault]:
    """Return the faults of a job with the runtime; `text` adds to the config, `files` are of the code."""
    (folder / "cloudtrain.yaml").write_text(f"name: x\nscript: train.py\n{text}\n")
    (folder / "train.py").write_text(files.pop("script", "print(1)\n"))
    for name, content in files.items():
        (folder / f"{name}.txt").write_text(content)
    config = configs.load(folder / "cloudtrain.yaml", environ={})
    return list(images.faults(config, runtime, gpus, folder))


HUB = "pytorch/pytorch:{}-cuda12.6-cudnn9-runtime"
REQUIRES = "requirements: base.txt"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("torch==2.12.0", "base.txt asks for torch==2.12.0, and `pytorch/pytorch:2.13.0"),
        ("numpy\ntorch >= 2.6, < 2.13  # old", "torch>=2.6,<2.13,"),
        ("torch==2.12.0 \\\n    --hash=sha256:00", "torch==2.12.0,"),
        ("torch==2.12.0; sys_platform == 'linux'", "torch==2.12.0,"),
        ("-r more.txt", "torch~=2.9.0"),
        ("torchvision==0.23.0", "torchvision==0.23.0"),
        ("torch==2.12.0 ; python_version >= '3.10' and python_version < '4.0' \\", "torch==2.12.0,"),
        ("torch==2.12.0; platform_system == \"Linux\" or sys_platform == 'darwin'", "torch==2.12.0,"),
        ("torch[opt-einsum] (==2.12.0)", "torch==2.12.0,"),
        ("torch @ https://x.org/whl/torch-2.12.0%2Bcu126-cp312-cp312-linux_x86_64.whl", "torch==2.12.0,"),
        ("torch==2.12.0; sys_platform != 'linux'", ""),
        ("torch==2.12.0; sys_platform == 'linux' and platform_machine == 'aarch64'", ""),
        ("torch==2.12.0; python_version < '3.10'", ""),
        ("torch==2.13.0\ntorchvision==0.28.0", ""),
        ("torch", ""),
        ("torch==2.2.2; sys_platform == 'darwin'", ""),
        ("torchmetrics==1.0\ntorch-geometric==2.5", ""),
    ],
)
def test_requirements_that_exclude_the_torch_are_refused(lines: str, said: str, tmp_path: Path) -> None:
    """The image's torch stays, so pip would refuse on the paid machines."""
    faults = found(tmp_path, images.of(HUB.format("2.13.0"), "yours"), REQUIRES, base=lines, more="torch~=2.9.0\n")
    assert [fault.is_warning for fault in faults] == [False] * bool(said)
    assert all(said in fault.message and "has torch 2.13.0, which stays" in fault.message for fault in faults)


@pytest.mark.parametrize(("lines", "is_warning"), [("torch\n-c more.txt", False), ("accelerate\n-c more.txt", True)])
def test_constraints_alone_are_no_certain_fault(lines: str, is_warning: bool, tmp_path: Path) -> None:
    """pip looks at a constraint only if another package needs torch."""
    (fault,) = found(tmp_path, images.of(HUB.format("2.13.0"), ""), REQUIRES, base=lines, more="torch==2.6.0\n")
    assert fault.is_warning is is_warning


@pytest.mark.parametrize(("torch", "vision"), [((2, 0, 1), "0.15.2"), ((1, 13, 1), "0.14.1"), ((2, 8, 0), "0.23.0")])
def test_the_torchvision_of_a_torch_is_not_excluded(torch: tuple[int, ...], vision: str) -> None:
    """The last numbers of the two differ, and below 2.0 the distance is another."""
    assert not images._excludes("torchvision", f"=={vision}", torch)


def test_torch_of_a_moving_name_is_refused_or_noted(tmp_path: Path) -> None:
    """A curated environment is rebuilt under its name: only a torch that no build has is refused."""
    verdicts: dict[str, list[list[bool]]] = {}
    for build in ("labels/latest", "versions/40"):
        name = f"azureml://registries/azureml/environments/acpt-pytorch-2.8-cuda12.6/{build}"
        for torch in ("2.13.0", "2.8.0", "2.10.0"):
            faults = found(tmp_path, images.of(name, "Azure's"), REQUIRES, base=f"torch=={torch}")
            verdicts.setdefault(build, []).append([fault.is_warning for fault in faults])
    assert verdicts == {"labels/latest": [[False], [True], []], "versions/40": [[False], [], [True]]}


@pytest.mark.parametrize(
    ("runtime", "said", "is_warning"),
    [
        (images.of(f"{AWS}/pytorch-training:1.13.1-cpu-py39-ubuntu20.04-sagemaker", ""), "has Python 3.9,", False),
        (images.of("azureml:AzureML-ACPT-pytorch-1.12-py39-cuda11.6-gpu:3", "", "a.environment"), "Python 3.9,", False),
        (images.of("my/train:py37", ""), "has Python 3.7 by its name", True),
        (images.of("my/train:2-cpu", ""), "is for CPUs by its name, and each machine has 8 GPUs", True),
        (images.of(f"{AWS}/pytorch:2.13-cpu-amzn2023-sagemaker", ""), "is for CPUs by its name", True),
        (images.of("python3.8", "", "ssh.python"), "change ssh.python", True),
        (images.of_conda("x:1", {"dependencies": ["python=3.8"]}, "", "a.conda"), "`a.conda on x:1` has Python", False),
        (images.of_conda("x:1", {"dependencies": ["conda-forge::python==3.9.7"]}, "", "a.conda"), "3.9", False),
    ],
)
def test_old_python_or_no_cuda_is_found_by_the_name(
    runtime: Runtime, said: str, is_warning: bool, tmp_path: Path
) -> None:
    """The nodes need 3.10; a vendor's name and a conda file are certain, another name suggests."""
    (fault,) = found(tmp_path, runtime)
    assert (fault.key, fault.is_warning) == (runtime.key, is_warning)
    assert said in fault.message
    assert "newer Python" in fault.hint or "with CUDA" in fault.hint


@pytest.mark.parametrize(
    ("name", "gpus", "is_found"),
    [
        (HUB.format("2.8.0"), 8, True),
        (HUB.format("2.13.0"), 8, False),
        (HUB.format("2.13.0"), 0, True),
        (f"{HUB.format('2.8.0')}@sha256:{'0' * 64}", 8, True),
        (HUB.format("2.8.0").replace("runtime", "devel"), 0, False),
        ("my/image:1", 8, False),
        (f"{AWS}/pytorch:2.13-cpu-amzn2023-sagemaker", 0, False),
    ],
)
def test_compile_without_a_compiler_is_found(name: str, gpus: int, is_found: bool, tmp_path: Path) -> None:
    """Triton needs a C compiler on GPUs; on CPUs torch.compile needs C++. The cure is the devel image, or `setup`."""
    script = "import torch\nmodel = torch.compile(model)\n"
    faults = found(tmp_path, images.of(name, "yours"), gpus=gpus, script=script)
    assert [fault.is_warning for fault in faults] == [True] * is_found
    assert all("-devel`" in fault.message and "setup:" in fault.message for fault in faults)
    assert found(tmp_path, images.of(name, "yours"), "setup: [apt-get install -y g++]", gpus=gpus, script=script) == []


@pytest.mark.parametrize(
    ("script", "text", "is_found"),
    [
        ("args = TrainingArguments(torch_compile=True)", "", True),
        ("args = TrainingArguments(torch_compile=False)", "", False),
        ("Accelerator(dynamo_backend='inductor')", "", True),
        ("model.compile()", "", True),
        ("print(1)", "args: {torch_compile: true}", True),
        ("print(torch.compiler.is_compiling())", "", False),
        ("# model = torch.compile(model)", "", False),
        ("torch_compile: bool = False", "", False),
        ("print(1)", "args: [--torch_compile, 'False']", False),
    ],
)
def test_other_ways_to_compile_are_found(script: str, text: str, is_found: bool, tmp_path: Path) -> None:
    """Options of Hugging Face and accelerate compile too."""
    faults = found(tmp_path, images.of(HUB.format("2.8.0"), "yours"), text, script=script)
    assert [fault.is_warning for fault in faults] == [True] * is_found


def test_task_that_compiles_is_refused(tmp_path: Path) -> None:
    """`training.compile` is no guess, so the job is not sent; the trainer's own need of torch is none either."""
    (tmp_path / "task.py").write_text("def model(params): ...\ndef dataset(params, split): ...\ndef loss(m, b): ...\n")
    (tmp_path / "cloudtrain.yaml").write_text("name: x\ntask: task.py\ntraining: {max_steps: 1, compile: true}\n")
    config = configs.load(tmp_path / "cloudtrain.yaml", environ={})
    (fault,) = images.faults(config, images.of(HUB.format("2.8.0"), "yours"), 8, tmp_path)
    assert (fault.key, fault.is_warning) == ("training.compile", False)
    assert "2.8.0-cuda12.6-cudnn9-devel" in fault.hint
    scripted = config.model_copy(update={"setup": ("bash install.sh",)})
    assert [each.is_warning for each in images.faults(scripted, images.of(HUB.format("2.8.0"), ""), 8, tmp_path)] == [
        True
    ]
    older = {"x/vertex-ai/training/pytorch-gpu.2-4.py310": False, "azureml:acpt-pytorch-2.2-cuda12.1:9": True}
    for name, is_guess in older.items():
        (fault,) = images.faults(config, images.of(name, "yours"), 8, tmp_path)
        assert (fault.key, fault.is_warning, "has torch 2." in fault.message) == ("image", is_guess, True)


def test_default_images_have_a_compiler_and_the_trainers_torch() -> None:
    """A default image must not fail at torch.compile on its GPUs."""
    for name in (vertex_request.IMAGE, vertex_request.BLACKWELL_IMAGE):
        facts = images.of(name, "ours")
        assert (facts.compiler, facts.torch[0] >= (2, 11)) == ("C", True)


BLOCKS: dict[str, tuple[dict[str, Any], str]] = {
    "sagemaker": (
        {"region": "eu-west-1", "role": "arn:aws:iam::123456789012:role/x", "bucket": "my-bucket"},
        f"image: {AWS}/pytorch:2.13-cu133-amzn2023-sagemaker (AWS's, as of ",
    ),
    "vertex": ({"project": "my-project", "staging_bucket": "gs://my-bucket"}, f"image: {vertex_request.IMAGE} (cloud"),
    "azureml": (
        {"subscription": "0" * 8 + "-0000-0000-0000-" + "0" * 12, "resource_group": "g", "workspace": "w"},
        "image: azureml://registries/azureml/environments/acpt-pytorch-2.8-cuda12.6/labels/latest (Azure's",
    ),
    "ssh": ({"hosts": ["h"]}, "python: python3 (as each host has it): the name does not say"),
    "slurm": ({"login": "l"}, "python: python3 (as each node has it): the name does not say"),
    "local": ({}, "python: /"),
}


@pytest.mark.parametrize(
    ("backend", "image", "verdict", "said"),
    [
        ("sagemaker", "pytorch/pytorch:2.13.0", "fail", "SageMaker pulls images from ECR"),
        ("sagemaker", f"{AWS}/pytorch-training:1.13.1-cpu-py39-ubuntu20.04-sagemaker", "fail", "has Python 3.9"),
        ("vertex", "nvcr.io/nvidia/pytorch:25.05-py3", "warn", "Artifact Registry and Docker Hub"),
        ("azureml", "my/train-py38:1", "warn", "has Python 3.8 by its name"),
    ],
)
def test_doctor_has_the_faults_of_the_image(backend: str, image: str, verdict: str, said: str, tmp_path: Path) -> None:
    """The check is by the request alone, so no account is needed."""
    block = BLOCKS[backend][0] | {"azureml": {"compute": "gpu-cluster", "region": "eastus"}}.get(backend, {})
    block = block | ({"location": "us-central1"} if backend == "vertex" else {})
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "cloudtrain.yaml").write_text(
        f"name: x\nscript: train.py\nbackend: {backend}\nimage: {image}\n"
        f'resources: {{accelerators: "A100:8"}}\n{backend}: {json.dumps(block)}\n'
    )
    (found,) = doubts_of_runtime(configs.load(tmp_path / "cloudtrain.yaml", environ={}))
    assert (found.name, found.verdict, said in found.found) == ("image", verdict, True)


@pytest.mark.parametrize("backend", BLOCKS)
def test_plan_names_what_runs_the_job(backend: str, cli: Callable[..., Any], tmp_path: Path) -> None:
    """Each backend's plan has one line, with the versions where they are known."""
    block, said = BLOCKS[backend]
    resources = "" if backend in ("ssh", "slurm", "local") else 'resources: {accelerators: "A100:8"}\n'
    if backend == "azureml":
        block = block | {"compute": "gpu-cluster", "region": "eastus"}
    if backend == "vertex":
        block = block | {"location": "us-central1"}
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "cloudtrain.yaml").write_text(
        f"name: x\nscript: train.py\nbackend: {backend}\n{resources}{backend}: {json.dumps(block)}\n"
    )
    lines = cli("plan", "--no-code", cwd=tmp_path).stdout.splitlines()
    (line,) = [line for line in lines if line.startswith(("image: ", "python: "))]
    assert line.startswith(said)
