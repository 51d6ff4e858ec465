"""Inputs that go along and inputs by backend: which files, their hash, what the plan says, and every refusal."""

import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher.backend_table import BUILT_IN, PLACES
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.planning import local_data
from cloudtrain.launcher.text import addresses

BLOCKS = """\
sagemaker: {region: us-east-1, role: "arn:aws:iam::123456789012:role/cloudtrain", bucket: cloudtrain-tests}
azureml: {subscription: 00000000-0000-0000-0000-000000000000, resource_group: research, workspace: vision}
vertex: {project: my-project, location: europe-west4, staging_bucket: my-training-bucket}
ssh: {hosts: [gpu1]}
slurm: {login: me@cluster, cpus_per_node: 1}
"""
MACHINES = {"sagemaker": "ml.m5.xlarge", "azureml": "Standard_D4s_v5", "vertex": "n1-standard-4"}
ALONG = sorted({*BUILT_IN} - {"local"})


def options(backend: str) -> list[str]:
    """Return the options that choose the backend and a machine of its own."""
    machine = ["--instance-type", MACHINES[backend]] if backend in MACHINES else []
    return ["--backend", backend, *machine]


@pytest.fixture
def folder(project: Callable[..., Path]) -> Path:
    """Return a project with the blocks of all backends and a folder of data in its code folder."""
    where = project(BLOCKS)
    (where / "data" / "sub").mkdir(parents=True)
    (where / "data" / "a.bin").write_bytes(b"x" * 3000)
    (where / "data" / "sub" / "b.txt").write_text("b")
    return where


@pytest.mark.parametrize("backend", ALONG)
def test_plan_says_what_goes_along(cli: Any, folder: Path, backend: str) -> None:
    """Number, size and place are in the plan; the code has no second copy; the request names the content."""
    plan = ("plan", "--set", "inputs.train=./data", *options(backend))
    shown = cli.ok(*plan, cwd=folder).stdout
    assert "inputs.train: ./data/ goes along: 2 files, 3.0 kB, copied once to" in shown
    assert ("less than 0.01 USD a month" in shown) == (backend in MACHINES)
    assert "code: 2 files" in shown
    assert "the code is sent without it" in shown
    assert cli.ok("plan", *options(backend), cwd=folder).stdout.count("code: 4 files") == 1
    assert cli.ok("validate", *plan[1:], cwd=folder).code == 0
    digest = local_data.data_at(folder / "data").digest()
    cli.ok("submit", "--dry-run", "-o", "out", *plan[1:], cwd=folder)
    written = "".join(path.read_text() for path in (folder / "out").iterdir() if path.is_file())
    assert f"data/{digest}/" in written or f"./data/@sha256:{digest}" in written


def test_local_backend_reads_in_place(cli: Any, folder: Path) -> None:
    """Nothing is copied on this machine, and the code is the same as on the other backends."""
    shown = cli.ok("plan", "--set", "inputs.train=data", cwd=folder).stdout
    assert "inputs.train: data is read in place; the code is sent without it" in shown
    assert "code: 2 files" in shown
    done = cli("plan", "--set", "inputs={train: daat, eval: 'azureml:eval:1'}", cwd=folder)
    assert (done.code, "did you mean `data`?" in done.stderr, "eval:1" in done.stderr) == (3, True, True), done.stderr


def test_package_that_is_data_too_stays_in_the_code(cli: Any, folder: Path) -> None:
    """`data/` has the loader that the script imports, and a file of the code may be an input."""
    (folder / "data" / "sub" / "loader.py").touch()
    inputs = "inputs={train: data, own: loop.py}"
    assert "code: 3 files" in cli.ok("plan", "--set", inputs, *options("ssh"), cwd=folder).stdout


def test_code_folder_as_data_is_still_shipped(cli: Any, folder: Path) -> None:
    """An input that is the code folder leaves nothing out of the code."""
    assert "code: 4 files" in cli.ok("plan", "--set", "inputs.train=.", *options("ssh"), cwd=folder).stdout


def test_hash_is_of_names_and_contents(tmp_path: Path) -> None:
    """Equal files elsewhere, with other times and modes, are the same data; a name or a byte makes other data."""
    digests = []
    for number, (name, text) in enumerate((("a", "1"), ("a", "1"), ("b", "1"), ("a", "2"))):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / name).write_text(text)
        os.utime(tmp_path / str(number) / name, (number, number))
        digests.append(local_data.data_at(tmp_path / str(number)).digest())
    assert digests[0] == digests[1]
    assert len({*digests}) == 3


def fifo(folder: Path) -> None:
    """Make a pipe."""
    os.mkfifo(folder / "pipe")


def listener(folder: Path) -> None:
    """Make a socket."""
    with pytest.MonkeyPatch.context() as patch, socket.socket(socket.AF_UNIX) as made:
        patch.chdir(folder)  # a socket's path has at most 107 bytes
        made.bind("sock")


@pytest.mark.parametrize(
    ("make", "said", "cure"),
    [
        (lambda f: (f / "out").symlink_to("/etc/hostname"), "`out` is a link that points outside", "cp -rL"),
        (lambda f: (f / "up").symlink_to("../loop.py"), "`up` is a link that points outside", "cp -rL"),
        (lambda f: (f / "dir").symlink_to("sub"), "`dir` is a link to a folder", "cp -rL"),
        (lambda f: (f / "me").symlink_to("me"), "`me` cannot be read", ""),
        (lambda f: (f / "gone").symlink_to("nothing"), "`gone` cannot be read", ""),
        (fifo, "`pipe` is neither a file nor a folder", "take it out"),
        (listener, "`sock` is neither a file nor a folder", "take it out"),
        (lambda f: (f / "a\nb").touch(), "has a name with characters that no bucket keeps", "rename"),
        (lambda f: Path(os.fsdecode(os.fsencode(f) + b"/\xff")).touch(), "has a name with characters", "rename"),
        (lambda f: (f / "sub" / ".env").write_text("A=1"), "`sub/.env` looks like a secret", ".cloudtrainignore"),
        (
            lambda f: (f / "id_rsa").touch(),
            "`id_rsa` looks like a secret, and would be uploaded with the data",
            "!id_rsa",
        ),
        (
            lambda f: (f / "n.txt").write_text("hf_" + "qRsTuVwXyZmNoPaBkLcJdIeHfGpOqNrMsL"),
            "`n.txt` holds a Hugging Face token",
            "!n.txt",
        ),
    ],
)
def test_files_that_cannot_go_along_are_refused(
    cli: Any, folder: Path, make: Callable[[Path], Any], said: str, cure: str
) -> None:
    """Each file is named with a cure, before anything is sent."""
    make(folder / "data")
    for command in ("plan", "validate"):
        done = cli(command, "--set", "inputs.train=data", *options("sagemaker"), cwd=folder, env={"COLUMNS": "500"})
        assert done.code == 3, done.stdout
        assert said in done.stderr, done.stderr
        assert cure in done.stderr, done.stderr


def test_link_inside_the_folder_is_its_file(folder: Path) -> None:
    """A link within the data goes along as the file that it points to."""
    (folder / "data" / "link").symlink_to("sub/b.txt")
    (folder / "data" / ".DS_Store").touch()
    data = local_data.data_at(folder / "data")
    assert data.sizes == {"a.bin": 3000, "link": 1, "sub/b.txt": 1}


def test_single_file_keeps_its_own_name(folder: Path) -> None:
    """A link to a file elsewhere, named as an input itself, goes along by the link's name."""
    (folder / "one.csv").symlink_to("data/a.bin")
    data = local_data.data_at(folder / "one.csv")
    assert (data.sizes, data.is_file, data.folder) == ({"one.csv": 3000}, True, folder)


def test_examples_of_the_page_run_on_all_backends(cli: Any, folder: Path) -> None:
    """The configs of docs/data.md are valid on each backend that they name."""
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    (folder / "train.py").write_text("print(1)\n")
    blocks = re.findall(r"```yaml\n(name.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    for text in blocks:
        (folder / "page.yaml").write_text(text + BLOCKS)
        for backend in BUILT_IN if "local: " not in text else ("local", "ssh", "sagemaker", "vertex"):
            cli.ok("validate", "page.yaml", *options(backend), cwd=folder)


def test_permitted_secret_goes_along(cli: Any, folder: Path) -> None:
    """A `!` line in the data's own .cloudtrainignore permits a file by its name."""
    (folder / "data" / "id_rsa").touch()
    (folder / "data" / ".cloudtrainignore").write_text("!id_rsa\n")
    assert "4 files" in cli.ok("plan", "--set", "inputs.train=data", *options("vertex"), cwd=folder).stdout


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("nodata", "there is no file or folder"),
        ("daat", "did you mean `data`?"),
        ("empty", "there is no file in"),
        ("/data", "a path relative to the config file goes along by itself"),
        ("file:///data", "elsewhere"),
    ],
)
def test_paths_without_data_are_refused(cli: Any, folder: Path, value: str, said: str) -> None:
    """A missing path, an empty folder and a path of the job's machine have a cure each."""
    (folder / "empty").mkdir()
    done = cli("plan", "--set", f"inputs.train={value}", *options("sagemaker"), cwd=folder, env={"COLUMNS": "500"})
    assert (done.code, said in done.stderr) == (3, True), done.stderr


@pytest.mark.parametrize("backend", ALONG)
def test_too_much_data_is_refused_with_the_vendors_command(cli: Any, folder: Path, backend: str) -> None:
    """Data over the bound, all inputs together, are refused at every backend; a larger bound takes them."""
    words = {"sagemaker": "aws s3 cp", "azureml": "az storage blob upload-batch", "vertex": "gcloud storage cp"}
    for name in ("one", "two"):
        (folder / name).mkdir()
        with (folder / name / "large").open("wb") as file:
            file.truncate(600_000_000)
    wanted = ("--set", "inputs={a: one, b: two}", *options(backend))
    done = cli("validate", *wanted, "--set", "code.max_data_gb=1", cwd=folder, env={"COLUMNS": "500"})
    assert "`two` makes 1.2 GB of data that goes along, over the 1 GB of code.max_data_gb" in done.stderr, done.stderr
    assert f"copy it once by `{words.get(backend, 'rsync')} " in done.stderr
    assert cli.ok("validate", *wanted, cwd=folder).code == 0
    twice = ("--set", "inputs.c=./one", "--set", "inputs.d=two/", "--set", "code.max_data_gb=2")  # one copy of each
    cli.ok("validate", *wanted, *twice, cwd=folder)


@pytest.mark.parametrize("backend", sorted(BUILT_IN))
def test_input_has_a_place_for_each_backend(cli: Any, folder: Path, backend: str) -> None:
    """One file has the data's place on all backends; a backend without a place is named with the form of its place."""
    places = {name: place.replace("NAME", "train") for name, place in PLACES.items()} | {"local": "data"}
    places = {name: place.replace("BUCKET", "my-bucket").replace("ACCOUNT", "acc") for name, place in places.items()}
    places["azureml"] = places["azureml"].replace("CONTAINER", "sets")
    where = ("validate", *options(backend))
    cli.ok(*where, "--set", f"inputs.train={json.dumps(places)}", cwd=folder)
    del places[backend]
    done = cli(*where, "--set", f"inputs.train={json.dumps(places)}", cwd=folder, env={"COLUMNS": "500"})
    assert f"the input `train` has no place for the backend `{backend}`" in done.stderr
    assert f"add `{backend}: {PLACES[backend].replace('NAME', 'train')}`" in done.stderr
    assert done.stderr.count("error:") == 1


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ("{loca: data, ssh: /data}", "did you mean `local`?"),
        ('{aws: "s3://b/x/", local: data}', "did you mean `sagemaker`?"),
        ("{default: data}", "unknown backend `default`"),
        ("{local: 5}", "expected text"),
        ("{local: [data]}", "expected text"),
        ("{local: null}", "expected text"),
        ("{}", "expected text"),
        ("[data]", "expected text"),
        ('{local: data, sagemaker: "s3://b/*.csv"}', "is a pattern"),
        ('{local: data, sagemaker: "a\\\\b"}', "is a path of Windows"),
    ],
)
def test_faulty_places_by_backend_are_refused(cli: Any, folder: Path, places: str, said: str) -> None:
    """Names of backends have a `did you mean`; each place is checked, also one of another backend."""
    done = cli("validate", "--set", f"inputs.train={places}", cwd=folder, env={"COLUMNS": "500"})
    assert (done.code, said in done.stderr) == (3, True), done.stderr


@pytest.mark.parametrize(
    ("uri", "is_beside"),
    [
        *((each, True) for each in ("data", "./data", "../data", "a b/c.csv", "data.v2", ".", "x@y", "1:2")),
        *((each, False) for each in ("/data", "~/data", "s3://b/x", "azureml:x:1", "file:///x", "C:/x", "\\\\h\\x")),
    ],
)
def test_relative_path_is_beside_the_file(uri: str, is_beside: bool) -> None:
    """The rule is the address's text alone."""
    assert addresses.is_beside(uri) == is_beside
    assert (addresses.placed("s3://b/p", uri) != uri) == is_beside


@pytest.mark.parametrize(
    ("uri", "place", "is_file"),
    [
        ("data/@sha256:" + "a" * 64, f"s3://b/p/data/{'a' * 64}/", False),
        ("../data.v2/@sha256:" + "a" * 64, f"s3://b/p/data/{'a' * 64}/", False),
        ("README@sha256:" + "a" * 64, f"s3://b/p/data/{'a' * 64}/README", True),
        ("x/a b.csv@sha256:" + "a" * 64, f"s3://b/p/data/{'a' * 64}/a b.csv", True),
    ],
)
def test_place_keeps_file_and_folder_apart(uri: str, place: str, is_file: bool) -> None:
    """A file without an ending stays a file, a folder with an ending stays a folder."""
    assert addresses.placed("s3://b/p", uri) == place
    assert addresses.is_file(place) == is_file
    assert addresses.path_of(uri) == uri.partition("@")[0]


def test_missing_data_are_reported_with_the_other_faults(cli: Any, folder: Path) -> None:
    """The plan, too, names the machine that is missing, the secret and the data in one go."""
    (folder / "data" / ".env").write_text("A=1")
    wanted = ("--backend", "sagemaker", "--set", "inputs={a: nodata, b: data, c: /x}")
    for command in ("plan", "validate", "submit"):
        done = cli(command, *wanted, cwd=folder, env={"COLUMNS": "500"})
        for said in ("which machines", "no file or folder", "`.env` looks like a secret", "`/x` is elsewhere"):
            assert said in done.stderr, (command, done.stderr)


def test_hash_of_another_backend_holds_on_this_machine(cli: Any, folder: Path) -> None:
    """A stored config, or one of `best`, runs here with the same data, and not with others."""
    pinned = f"data/@sha256:{local_data.data_at(folder / 'data').digest()}"
    shown = cli.ok("submit", "--dry-run", "--set", f"inputs.train={pinned}", cwd=folder).json
    assert shown["inputs"] == {"train": "data/"}
    (folder / "data" / "new").touch()
    done = cli("plan", "--set", f"inputs.train={pinned}", cwd=folder)
    assert (done.code, "has changed since" in done.stderr) == (3, True)


def test_changed_data_are_not_sent_under_the_old_hash(folder: Path) -> None:
    """After the submit was prepared a change is refused, with the command that takes today's data."""
    pinned = f"data/@sha256:{local_data.data_at(folder / 'data').digest()}"
    assert local_data.as_submitted(folder, "train", pinned)[0].bytes == 3001
    (folder / "data" / "a.bin").write_bytes(b"y" * 3000)
    with pytest.raises(ConfigError, match="has changed since the submit was prepared") as caught:
        local_data.as_submitted(folder, "train", pinned)
    assert "--set inputs.train=data/" in caught.value.faults[0].hint
