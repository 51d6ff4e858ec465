"""Model folders on their way: to a local folder, to a bucket, and to hosts with sshd, with faults on the way."""

import hashlib
import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints.models.folder import verify, write_sums
from cloudtrain.entrypoints.stores.store import open_store
from doubles.aws.handle import Aws
from doubles.sshhosts.cluster import Cluster

BIG = 9 << 20  # more than two blocks


def model(folder: Path, word: str, *, name: str = "digits", passed: bool = True) -> Path:
    """Write a model folder whose weights consist of the word."""
    (folder / "code").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"format": 1, "name": name}))
    (folder / "check.json").write_text(json.dumps({"passed": passed}))
    (folder / "model.safetensors").write_bytes(word.encode() * (BIG // len(word)))
    (folder / "code" / "task.py").write_text("")
    write_sums(folder, {})
    return folder


def pushed(cli: Any, *words: str, code: int = 0, **options: Any) -> dict[str, str | None]:
    """Push, and return the error by target."""
    done = cli("push", *words, "--json", **options)
    assert done.code == code, done.stdout + done.stderr
    return {each["target"]: each["error"] for each in done.json["targets"]}


def test_folder_gets_versions_and_a_current_link(cli: Any, tmp_path: Path) -> None:
    """The link names the newest push; two versions before stay; `--back` returns to the version before."""
    place = tmp_path / "place"
    for word in ("one", "two", "three", "four"):
        assert pushed(cli, str(model(tmp_path / word, word)), str(place)) == {str(place): None}
        assert verify(place / "current").path == place / "current"
        assert (place / "current" / "model.safetensors").read_bytes().startswith(word.encode())
    versions = [verify(tmp_path / word).digest[:12] for word in ("two", "three", "four")]
    known = {"name": "digits", "versions": versions, "current": versions[-1]}
    assert json.loads((place / "versions.json").read_text()) == known
    assert sorted(path.name for path in place.iterdir()) == sorted([*versions, "current", "versions.json", ".lock"])
    for expected, version in (("three", versions[1]), ("two", versions[0])):
        assert cli("push", "--back", str(place)).stdout == f"{place}: version {version} is current\n"
        assert (place / "current" / "model.safetensors").read_bytes().startswith(expected.encode())
    refused = cli("push", "--back", str(place))  # never on to the version that was left
    assert (refused.code, "no version before the current one" in refused.stdout) == (7, True)


def test_link_tells_the_current_version_after_a_death(cli: Any, tmp_path: Path) -> None:
    """A process that dies between the link and versions.json loses no version: `--back` and the next push know it."""
    place = tmp_path / "place"
    pushed(cli, str(model(tmp_path / "one", "one")), str(place))
    before = (place / "versions.json").read_bytes()
    pushed(cli, str(model(tmp_path / "two", "two")), str(place))
    (place / "versions.json").write_bytes(before)
    pushed(cli, "--back", str(place))
    assert (place / "current" / "model.safetensors").read_bytes().startswith(b"one")
    pushed(cli, str(model(tmp_path / "three", "three")), str(place))
    versions = [verify(tmp_path / word).digest[:12] for word in ("one", "two", "three")]
    assert json.loads((place / "versions.json").read_text())["versions"] == versions


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("s4://bucket/x", "no place that this version knows"),
        ("gpu1:", "is no place"),
        (":/x", "is no place"),
        ("good", "is a model folder itself"),
    ],
)
def test_faulty_place_is_refused(cli: Any, tmp_path: Path, place: str, words: str) -> None:
    """A place that is none makes no folder, and a model folder stays as it is."""
    good = model(tmp_path / "good", "good")
    before = {path.name for path in tmp_path.iterdir()} | {"home"}
    refused = cli("push", "good", place)
    assert (refused.code in (2, 7), words in refused.stdout + refused.stderr) == (True, True)
    assert {path.name for path in tmp_path.iterdir()} | {"home"} == before
    verify(good)


def test_names_outside_the_folder_are_refused(cli: Any, tmp_path: Path) -> None:
    """A list of checksums that names a file outside the folder is damaged, and nothing is written outside."""
    good = model(tmp_path / "good", "good")
    (tmp_path / "evil").write_text("x")
    with (good / "SHA256SUMS").open("a") as file:
        file.write(f"{hashlib.sha256(b'x').hexdigest()}  ../evil\n")
    refused = cli("push", "good", "place")
    assert (refused.code, "names a file outside the folder" in refused.stderr) == (3, True)
    assert not (tmp_path / "place").exists()


@pytest.mark.parametrize("listed", [["../../kept", "..", "../../kept", "kept"], 5, [None, ["x"], 7], "kept"])
def test_strangers_list_of_versions_removes_nothing(cli: Any, tmp_path: Path, listed: Any) -> None:
    """Others may write to a shared place: no name but a version's is ever removed there, or anywhere else."""
    place = tmp_path / "a" / "place"
    for kept in (tmp_path / "kept", place / "kept"):
        kept.mkdir(parents=True)
    (place / "versions.json").write_text(json.dumps({"name": "digits", "versions": listed, "current": ["x"]}))
    pushed(cli, str(model(tmp_path / "good", "good")), str(place))
    assert [(tmp_path / "kept").is_dir(), (place / "kept").is_dir()] == [True, True]


def test_pushes_at_once_lose_no_version(cli: Any, tmp_path: Path) -> None:
    """Several pushes at once: versions.json has all versions, and the link names one of them."""
    folders = [model(tmp_path / str(number), f"{number}-") for number in range(3)]
    children = [cli.start("push", str(folder), "file://" + str(tmp_path / "place")) for folder in folders]
    for child in children:
        child.communicate()
    known = json.loads((tmp_path / "place" / "versions.json").read_text())
    assert set(known["versions"]) == {verify(folder).digest[:12] for folder in folders}
    assert known["current"] == (tmp_path / "place" / "current").readlink().name


def test_wrong_folders_and_places_are_refused(cli: Any, tmp_path: Path) -> None:
    """A changed byte, a failed check, a different model at the place, no earlier version: each says the cure."""
    place, good = tmp_path / "place", model(tmp_path / "good", "good")
    damaged = shutil.copytree(good, tmp_path / "damaged")
    (damaged / "code" / "task.py").write_text("x")
    refused = cli("push", str(damaged), str(place))
    assert (refused.code, "task.py is damaged" in refused.stderr) == (3, True)
    refused = cli("push", str(model(tmp_path / "failed", "failed", passed=False)), str(place))
    assert (refused.code, "its check failed" in refused.stderr) == (3, True)
    assert cli("push", str(good)).code == 2
    pushed(cli, str(good), str(place))
    other = str(model(tmp_path / "other", "other", name="faces"))
    (error,) = pushed(cli, other, str(place), code=7).values()
    assert error is not None
    assert "holds the model digits, not faces" in error
    pushed(cli, other, str(place), "--replace")
    pushed(cli, "--back", str(place))
    (error,) = pushed(cli, "--back", str(tmp_path / "empty"), code=7).values()
    assert error is not None
    assert "holds no model" in error
    assert not (tmp_path / "empty").exists()


def test_bucket_gets_the_files_before_the_version(cli: Any, account: Aws, tmp_path: Path) -> None:
    """The objects of a version are complete before versions.json names the version; old versions are deleted."""
    place = "s3://cloudtrain-tests/models/digits"
    store = open_store(place)
    for word in ("one", "two", "three", "four"):
        assert pushed(cli, str(model(tmp_path / word, word)), place) == {place: None}
    known = json.loads(store.read("versions.json")[0] or b"")
    versions = [verify(tmp_path / word).digest[:12] for word in ("two", "three", "four")]
    assert known == {"name": "digits", "versions": versions, "current": versions[-1]}
    names = {name.partition("/")[0] for name in store.names("")}
    assert names == {*versions, "versions.json"}
    store.get(f"{versions[-1]}/model.safetensors", tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == (tmp_path / "four" / "model.safetensors").read_bytes()
    assert pushed(cli, "--back", place) == {place: None}
    assert json.loads(store.read("versions.json")[0] or b"")["current"] == versions[1]


@pytest.mark.slow
def test_hosts_copy_from_each_other_and_a_dead_host_is_told(
    cli: Any, cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four hosts get equal files and one host is down: told by name; a later push completes and verifies the host."""
    many = cluster(5)
    many.apply(monkeypatch)
    (tmp_path / "cloudtrain.yaml").write_text(
        "name: j\nbackend: ssh\nscript: a.py\nssh: {hosts: [h0, h1, h2, h3, h4], ssh_config: '${SSH_CONFIG}'}\n"
    )
    (tmp_path / "a.py").touch()
    first, place = model(tmp_path / "first", "first"), "h0,h1,h2,h3,h4:/opt/digits"
    many.hosts[3].power_off()
    told = pushed(cli, str(first), place, code=7, cwd=tmp_path, timeout_s=120)
    assert [host for host, error in told.items() if error] == ["h3"], told
    many.hosts[3].boot()
    data = many.hosts[1].folder / "opt" / "digits"
    weights = data / verify(first).digest[:12] / "model.safetensors"
    weights.write_bytes(b"x" + weights.read_bytes()[1:])
    told = pushed(cli, str(first), place, cwd=tmp_path, timeout_s=120)
    assert set(told.values()) == {None}
    second = model(tmp_path / "second", "second")
    assert set(pushed(cli, str(second), place, cwd=tmp_path, timeout_s=120).values()) == {None}
    assert set(pushed(cli, "--back", place, cwd=tmp_path, timeout_s=120).values()) == {None}
    for host in many.hosts:
        assert host.run(["readlink", "/opt/digits/current"]).strip() == verify(first).digest[:12]
        assert host.run(["sh", "-c", "cd /opt/digits/current && sha256sum --quiet -c SHA256SUMS"]) == ""


@pytest.mark.soak
def test_killed_push_leaves_the_old_model_or_the_new(cli: Any, tmp_path: Path) -> None:
    """After kill -9 at a random moment, 200 times, `current` is a whole model; the next push completes."""
    draw, place = random.Random(0), tmp_path / "place"
    folders = [model(tmp_path / word, word) for word in ("one", "two")]
    pushed(cli, str(folders[0]), str(place))
    kills = 0
    for number in range(200):
        child = cli.start("push", str(folders[number % 2]), str(place))
        try:
            child.wait(draw.uniform(0.0, 0.12))
        except subprocess.TimeoutExpired:
            child.kill()
            kills += 1
        child.communicate()
        assert verify(place / "current").digest in {verify(folder).digest for folder in folders}
        if number % 5 == 0:
            shutil.rmtree(place / verify(folders[(number + 1) % 2]).digest[:12], ignore_errors=True)
            pushed(cli, str(folders[number % 2]), str(place))
    assert kills > 20
    assert pushed(cli, str(folders[0]), str(place)) == {str(place): None}
