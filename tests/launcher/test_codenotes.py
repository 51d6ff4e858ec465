"""The plan's notes about unused files in the code folder."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import config as configs
from cloudtrain.launcher.config.codenotes import notes_of

HEADER = '# /// script\n# requires-python = ">=3.10"\n# dependencies = ["rich"]\n# ///\nimport rich\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a config and its script."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "cloudtrain.yaml").write_text("name: x\nscript: train.py\nssh: {hosts: [a]}\n")
    return tmp_path


def notes(folder: Path, *settings: str, backend: str = "local") -> list[str]:
    """Return the notes of the folder's config."""
    config = configs.load(folder / "cloudtrain.yaml", overrides=settings, backend=backend)
    return list(notes_of(config, folder))


@pytest.mark.parametrize("backend", ["local", "ssh", "vertex"])
def test_unused_requirements_file_has_a_note(folder: Path, backend: str) -> None:
    """The note has the key to set; a set key, or a command that installs the file, ends the note."""
    assert notes(folder, backend=backend) == []
    (folder / "requirements.txt").write_text("rich\n")
    said = ["nothing installs requirements.txt on the nodes: set `requirements: requirements.txt`"]
    assert notes(folder, backend=backend) == said
    assert notes(folder, "requirements=requirements.txt", backend=backend) == []
    assert notes(folder, "setup=[pip install -r requirements.txt]", backend=backend) == []
    (folder / "r.txt").write_text("# ${OLD}\n--index-url https://me:${TOKEN}@x/simple\n")
    lost = "r.txt reads TOKEN: set `secrets: [TOKEN]`, unless each node has the variable"
    assert notes(folder, "requirements=r.txt", backend=backend) == [lost]
    assert notes(folder, "requirements=r.txt", "secrets=[TOKEN]", backend=backend) == []
    (folder / "r.txt").write_text(
        "# torch==2.0\ntorch>=2\ntorchmetrics==1.0\n torch == 2.3.0+cu121 ; python_version>'3'\n"
    )
    pinned = "r.txt asks for torch == 2.3.0+cu121: with another torch on a node, the job fails at its start"
    assert notes(folder, "requirements=r.txt", backend=backend) == [pinned]
    ssh = notes(folder, "ssh.environment=venv", "ssh.requirements=requirements.txt", backend=backend)
    assert ssh == ([] if backend == "ssh" else said)


def test_unused_requirements_of_a_script_have_a_note(folder: Path) -> None:
    """A header of PEP 723 lists packages, or none; a repository may have a requirements file for each example."""
    (folder / "train.py").write_text(HEADER)
    said = "the header of train.py lists packages, and nothing installs them: set `requirements: train.py`"
    assert notes(folder) == [said]
    assert notes(folder, "requirements=train.py") == []
    (folder / "train.py").write_text('# /// script\n# requires-python = ">=3.10"\n# ///\n')
    assert notes(folder) == []
    (folder / "examples").mkdir()
    (folder / "examples/train.py").write_text("")
    (folder / "examples/requirements.txt").write_text("rich\n")
    assert notes(folder, "script=examples/train.py")[0].endswith("set `requirements: examples/requirements.txt`")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("bash install", "setup: install has Windows line ends (CRLF), and fails on a node: sed -i 's/\\r$//' install"),
        ("set -e; . ./install", "setup: ./install has Windows line ends"),
        ("bash -e tools\\mend", "setup: bash drops the backslashes of `tools\\mend`: write `tools/mend`"),
        ("tools\\mend", "setup: bash drops the backslashes"),
        (".venv\\Scripts\\activate", "setup: bash drops the backslashes"),
        ("tools/mend && pip list", ""),
        ("python install", ""),
        ("bash install.sh", ""),
    ],
)
def test_habits_of_windows_in_setup_have_a_note(folder: Path, command: str, said: str) -> None:
    """A file that bash reads with CRLF, and a path with backslashes; scripts by name have the note of the packing."""
    (folder / "tools").mkdir()
    for name, end in (("install", "\r\n"), ("install.sh", "\r\n"), ("tools/mend", "\n")):
        (folder / name).write_bytes(f"echo{end}".encode())
    found = list(notes_of(configs.load(folder / "cloudtrain.yaml", overrides=[f"setup=['{command}']"]), folder))
    assert [note[: len(said)] for note in found] == [said] * bool(said)


def test_paths_of_windows_in_arguments_have_a_note(folder: Path) -> None:
    """Where the code has the file, the words are a path; a colon parts the folders of PYTHONPATH."""
    (folder / "data").mkdir()
    said = notes(folder, "args=['--out=data\\train', '--data', 'data\\']", "env={PYTHONPATH: 'src;lib'}")
    assert said == [
        "args: a path has slashes on the nodes: write `data/` in place of `data\\`",
        "env.PYTHONPATH: a colon parts the folders on the nodes: write `src:lib`",
    ]


def test_options_left_out_have_a_note(folder: Path) -> None:
    """An option that is on by default stays on: the note names all that the config leaves out."""
    said = notes(folder, "args={pin: false, lr: 0, b: no, c: null, d: 'off', f: ''}", "resume_args.e=OFF")
    assert [note.partition(":")[0] for note in said] == ["args.pin, args.b, args.c, resume_args.e"]
    assert notes(folder, "args=[--pin, false]") == []


def test_package_in_a_folder_on_no_path_has_a_note(folder: Path) -> None:
    """A `src` layout needs PYTHONPATH, or an installation; the script's folder and the code's root need no setting."""
    for name in ("src/deep_mine", "pkg_at_root", "scripts/beside"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("")
    (folder / "scripts/train.py").write_text(
        "import os\nimport beside, torch\nimport pkg_at_root.x\ndef main():\n    from deep_mine import y\n"
    )
    said = "scripts/train.py imports deep_mine, which lies in src: set `env: {PYTHONPATH: src}`"
    assert notes(folder, "script=scripts/train.py") == [said]
    (folder / "r.txt").write_text("./src\n")
    for setting in ("env={PYTHONPATH: src}", "setup=[pip install -e .]", "requirements=r.txt"):
        assert notes(folder, "script=scripts/train.py", setting) == []


def test_script_with_a_rank_for_each_host_has_a_note(folder: Path) -> None:
    """AWS's example for MNIST: with a rank for each GPU, four ranks would each train alone on all of the data."""
    text = "import torch.distributed as d\nrank = hosts.index(os.environ['SM_CURRENT_HOST'])\n"
    (folder / "train.py").write_text(f"{text}d.init_process_group('nccl', rank=rank, world_size=2)\n")
    config = configs.load(folder / "cloudtrain.yaml", overrides=["resources.instances=2"], backend="sagemaker")
    said = ["train.py gives each host one rank (SM_CURRENT_HOST): set `distributed.nproc_per_node: 1`"]
    assert [list(notes_of(config, folder, ranks)) for ranks in (8, 2)] == [said, []]
    (folder / "train.py").write_text(f"{text}os.environ['RANK'] = str(8 * rank + local_rank)\n")
    assert list(notes_of(config, folder, 8)) == []


def test_empty_submodule_has_a_note(folder: Path) -> None:
    """A clone without its submodules has empty folders; a folder outside the code folder does not count."""
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (folder / ".gitmodules").write_text('[submodule "a"]\n\tpath = third/a\n\turl = x\n[submodule "b"]\n\tpath = b\n')
    for name in ("third/a", "b"):
        (folder / name).mkdir(parents=True)
    (folder / "b/file").write_text("")
    said = "code: the git submodule `third/a` is empty, and shipped so; git submodule update --init third/a"
    assert notes(folder) == [said]
    config = configs.load(folder / "cloudtrain.yaml")
    assert list(notes_of(config, folder / "third")) == [said]
    assert list(notes_of(config, folder / "b")) == []


def test_unknown_module_has_a_note(folder: Path, cli: Any) -> None:
    """The nodes may have the module, so the config is not refused; the plan shows the notes."""
    (folder / "cloudtrain.yaml").write_text("name: x\nmodule: nowhere.train\n")
    assert notes(folder) == [
        "module: `nowhere` is neither in the code folder nor installed here; the nodes must have it"
    ]
    assert notes(folder, "module=json.tool") == []
    (folder / "src/nowhere").mkdir(parents=True)
    (folder / "src/nowhere/train.py").touch()
    assert notes(folder)[0].endswith("; src/ has it: set `distributed.workdir: src`, or `env.PYTHONPATH`")
    for setting in ("distributed.workdir=src", "env.PYTHONPATH=src", "env.PYTHONPATH=$CLOUDTRAIN_CODE_DIR/src"):
        assert notes(folder, setting) == []
    (folder / "requirements.txt").write_text("rich\n")
    assert "nothing installs requirements.txt on the nodes" in cli("plan", cwd=folder).stdout


SAVING = "import torch\nimport torch.distributed\ntorch.save({}, 'last.pt')\n"
LOST = "train.py saves files, and `keep` is not set: "
SHORT = "train.py takes --resume, and `resume_args` is not set: "
ALONE = "train.py does not name torch.distributed: each rank would train alone, on all of the data"


DIST, TWO = "import torch.distributed as d\n", ("resources.instances=2",)
DEEP = "import deepspeed\n"
TWO_RANKS = ("distributed.nproc_per_node=2",)


@pytest.mark.parametrize(
    ("text", "settings", "begin"),
    [
        (SAVING, (), LOST),
        (SAVING, ("keep=[last.pt]",), None),
        (SAVING, ("outputs={model: here}",), None),
        (f"{SAVING}os.environ['CLOUDTRAIN_CHECKPOINT_DIR']\n", (), None),
        ("import torch\n", (), None),
        (f"{SAVING}parser.add_argument('--resume')\n", ("keep=[last.pt]",), SHORT),
        (f"{SAVING}parser.add_argument('--resume')\n", ("keep=[last.pt]", "resume_args=[--resume]"), None),
        (f"{SAVING}parser.add_argument('--lr')\n", ("keep=[last.pt]",), None),
        ("import torch\n", ("resources.instances=2",), ALONE),
        ("import torch\n", ("distributed.nproc_per_node=2",), ALONE),
        ("import torch\n", ("resources.instances=2", "distributed.allow_alone=true"), None),
        ("from accelerate import Accelerator\n", ("resources.instances=2",), None),
        (f"{DIST}os.environ['MASTER_ADDR'] = 'localhost'\n", TWO, "train.py sets MASTER_ADDR to 'localhost': with"),
        (f"{DIST}def f():\n  environ['MASTER_PORT'] = str(find_free_port())\n", TWO, "train.py sets MASTER_PORT to"),
        (f"{DIST}d.init_process_group('gloo', init_method='tcp://127.0.0.1:1')\n", TWO, "train.py sets init_method to"),
        (
            f"{DIST}os.environ['WORLD_SIZE'] = '1'\n",
            ("distributed.nproc_per_node=2",),
            "train.py sets WORLD_SIZE to '1'",
        ),
        (f"{DIST}os.environ.update(MASTER_ADDR='::1', X=a)\n", TWO, "train.py sets MASTER_ADDR to '::1': with"),
        (f"{DIST}os.environ |= {{**a, 'MASTER_PORT': '1'}}\n", TWO, "train.py sets MASTER_PORT to '1': with"),
        (f"{DIST}os.environ['MASTER_PORT'] = str(12355)\n", TWO, "train.py sets MASTER_PORT to str(12355): with"),
        (f"{DIST}d.init_process_group('gloo', 'tcp://localhost:1')\n", TWO, "train.py sets init_method to"),
        (f"{DIST}os.environ['MASTER_PORT'] = str(args.port)\n", TWO, None),
        (f"{DIST}os.environ.update(a, OMP_NUM_THREADS='1')\n", TWO, None),
        (f"{DIST}os.environ['MASTER_ADDR'] = 'localhost'\n", (), None),
        (f"{DIST}os.environ['MASTER_ADDR'] = 'localhost'\n", (*TWO, "distributed.allow_alone=true"), None),
        (f"{DIST}if 'RANK' not in os.environ:\n    os.environ['MASTER_ADDR'] = 'localhost'\n", TWO, None),
        (f"{DIST}os.environ.setdefault('MASTER_ADDR', 'localhost')\n", TWO, None),
        (f"{DIST}d.init_process_group('nccl', init_method='env://')\n", TWO, None),
        (
            f"{DIST}p.add_argument('--local_rank', type=int)\n",
            TWO,
            "train.py takes --local_rank, which torchrun does not",
        ),
        (f"{DIST}p.add_argument('--local_rank')\n", (*TWO, "args=[--local_rank=$LOCAL_RANK]"), None),
        (f"{DIST}p.add_argument('-l', '--local-rank')\n", TWO, "train.py takes --local-rank, which torchrun does not"),
        (
            f"{DIST}click.option('--local_rank')(f)\n",
            TWO,
            "train.py takes --local_rank, which torchrun does",
        ),
        (
            "import torch\n",
            ("args=[$HOME/a, '$${SLURM_JOB_ID}', $RANK, $$HOME, '$${oc.env:HOME}', $CLOUDTRAIN_JOB]",),
            "args: no shell replaces `$HOME`, `$SLURM_JOB_ID`: the script",
        ),
        (
            "import torch\n",
            ("args=[$SM_CHANNEL_TRAIN, $SM_HPS]",),
            "args: no shell replaces `$SM_CHANNEL_TRAIN`, `$SM_HPS`: the script gets this text; write `$CL",
        ),
        ("import torch\n", ("args=['--data=C:/data']",), "args: no node has `C:/data`: name the data under `inputs`"),
        ("import torch\n", ("args=[$RANK, $$HOME, '$${oc.env:HOME}', '$${RANK}', US$]",), None),
        (
            "import torch\n",
            ("args=[--nproc-per-node=4, --lr, '1']",),
            "args: --nproc-per-node is an option of the `torchrun`",
        ),
        (
            "import torch\n",
            ("args=[--standalone]",),
            "args: --standalone is an option of the `torchrun` launcher: leave it out",
        ),
        ("p.add_argument('--nproc_per_node')\n", ("args=[--nproc-per-node=4]",), None),
        (DEEP, ("args=[--num_gpus=4, --lr, '1']",), "args: --num_gpus is an option of the `deepspeed` launcher"),
        (
            DEEP,
            ("args=[--hostfile, hosts]",),
            "args: --hostfile is an option of the `deepspeed` launcher: leave it out",
        ),
        ("import torch\n", ("args=[--deepspeed, ds.json, --include=a]",), "args: --include is an option of the"),
        (f"{DEEP}p.add_argument('--num_gpus')\n", ("args=[--num_gpus=4]",), None),
        (DEEP, ("args=[--deepspeed, --deepspeed_config, ds.json]",), None),
        ("import torch\n", ("args=[--num_gpus=4, --include=a]",), None),
        (f"{DIST}p.add_argument('--local_rank', default=os.environ['LOCAL_RANK'])\n", TWO, None),
    ],
)
def test_script_that_would_lose_work_has_a_note(
    folder: Path, text: str, settings: tuple[str, ...], begin: str | None
) -> None:
    """A guess from the script's text warns of lost files, of a restart without its option, and of lonely ranks."""
    (folder / "train.py").write_text(text)
    assert [note.startswith(begin or "") for note in notes(folder, *settings)] == [True] * (begin is not None)


SAVES = "import os, torch\ntorch.save({}, os.environ[%s] + '/a')\n"


@pytest.mark.parametrize(
    ("backend", "name", "settings", "said"),
    [
        ("sagemaker", "SM_MODEL_DIR", (), []),
        ("sagemaker", "SM_OUTPUT_DATA_DIR", (), []),
        ("azureml", "AZURE_ML_OUTPUT_output", (), []),
        (
            "azureml",
            "AZURE_ML_OUTPUT_model",
            (),
            ["train.py saves", "train.py uses AZURE_ML_OUTPUT_model, which no job"],
        ),
        ("vertex", "AIP_CHECKPOINT_DIR", (), []),
        ("local", "SM_MODEL_DIR", ("env={SM_MODEL_DIR: $CLOUDTRAIN_OUTPUT_DIR}",), []),
        *(
            (backend, name, (), ["train.py saves", f"train.py uses {name}, which only {vendor} has: use {ours}"])
            for backend, name, vendor, ours in (
                ("local", "SM_MODEL_DIR", "Amazon SageMaker", "CLOUDTRAIN_OUTPUT_DIR"),
                ("ssh", "SM_CHANNEL_TRAINING", "Amazon SageMaker", "CLOUDTRAIN_INPUT_TRAINING"),
                ("slurm", "AIP_MODEL_DIR", "Google Vertex AI", "CLOUDTRAIN_OUTPUT_DIR"),
                ("vertex", "SM_OUTPUT_DATA_DIR", "Amazon SageMaker", "CLOUDTRAIN_OUTPUT_DIR"),
                ("sagemaker", "AIP_TENSORBOARD_LOG_DIR", "Google Vertex AI", "CLOUDTRAIN_OUTPUT_DIR"),
                ("azureml", "AIP_MODEL_DIR", "Google Vertex AI", "CLOUDTRAIN_OUTPUT_DIR"),
                ("sagemaker", "AZURE_ML_INPUT_train", "Azure Machine Learning", "CLOUDTRAIN_INPUT_TRAIN"),
                ("vertex", "SM_HPS", "Amazon SageMaker", "the options of `args`"),
            )
        ),
        (
            "vertex",
            "AIP_TRAINING_DATA_URI",
            (),
            ["train.py saves", "train.py uses AIP_TRAINING_DATA_URI, which no job of cloudtrain has: use CLOUDTRAIN_I"],
        ),
        ("sagemaker", "SM_CHANNEL_A", (), ["train.py saves", "train.py reads SM_CHANNEL_A, and `inputs` has no `a`"]),
        ("sagemaker", "SM_CHANNEL_A", ("inputs={a: s3://bucket/a/}", "keep=[x]"), []),
        ("sagemaker", "SM_CHANNEL_A", ("inputs={A: s3://bucket/a/}", "keep=[x]"), []),
        (
            "local",
            "SM_NETWORK_INTERFACE_NAME",
            (),
            ["train.py saves", "train.py uses SM_NETWORK_INTERFACE_NAME"],
        ),
        ("ssh", "CLOUD_ML_JOB_ID", (), ["train.py saves", "train.py uses CLOUD_ML_JOB_ID, which only Google Vertex"]),
    ],
)
def test_variables_of_one_platform_have_a_note_elsewhere(
    folder: Path, backend: str, name: str, settings: tuple[str, ...], said: list[str]
) -> None:
    """Only where the platform sets the variable are the files kept; elsewhere the note has cloudtrain's own name."""
    (folder / "train.py").write_text(SAVES % repr(name))
    found = notes(folder, *settings, backend=backend)
    assert [note.startswith(begin) for note, begin in zip(found, said, strict=True)] == [True] * len(said), found


@pytest.mark.parametrize(
    "text",
    [
        "d = os.environ['SM_MODEL_DIR'] if 'SM_MODEL_DIR' in os.environ else 'out'\n",
        "d = os.environ.get('SM_MODEL_DIR', os.environ.get('CLOUDTRAIN_OUTPUT_DIR'))\n",
        "# as SM_MODEL_DIR in SageMaker\ncuda = 'SM_80'\n",
        "n = int(os.environ.get('SM_NUM_GPUS', 1))\nrun = os.getenv('AZUREML_RUN_ID')\n",
        "if os.environ.get('SM_HOSTS') is not None:\n  pass\n",
    ],
)
def test_script_that_serves_several_platforms_has_no_note(folder: Path, text: str) -> None:
    """The script asks whether the variable is there, reads cloudtrain's too, or names the variable in a comment."""
    (folder / "train.py").write_text(f"import os\n{text}")
    assert notes(folder) == []


def test_deepspeeds_file_of_variables_has_a_note(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher reads it in the folder and at home; the note names the variables that `env` lacks, never a value."""
    (folder / "train.py").write_text(DEEP)
    (folder / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\nTOKEN=secret\n\n")
    said = "nothing reads .deepspeed_env, which `deepspeed` would: set"
    assert notes(folder) == [f"{said} NCCL_DEBUG, TOKEN under `env`"]
    assert notes(folder, "env={NCCL_DEBUG: INFO}") == [f"{said} TOKEN under `env`"]
    (home := folder / "home").mkdir()
    monkeypatch.setattr(Path, "home", lambda: home)
    (folder / ".deepspeed_env").rename(home / ".deepspeed_env")
    assert notes(folder, "env={TOKEN: x}") == [
        "nothing reads ~/.deepspeed_env, which `deepspeed` would: set NCCL_DEBUG under `env`"
    ]
    (folder / "train.py").write_text("import torch\n")
    assert notes(folder) == []


def test_ranks_of_a_machines_gpus_count(folder: Path) -> None:
    """Without a number of ranks in the config, the plan knows the GPUs of the machine."""
    (folder / "train.py").write_text(f"{DIST}p.add_argument('--local_rank')\n")
    config = configs.load(folder / "cloudtrain.yaml")
    counts = [len(list(notes_of(config, folder, ranks))) for ranks in (1, 8)]
    assert (counts, notes(folder, "distributed.allow_alone=true", "resources.instances=2")) == ([0, 1], [])
