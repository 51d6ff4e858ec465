"""For secrets in `env` and arguments, `plan`, dry run and `validate` point to `secrets`, with the place in the file."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Cli

TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"[:34].swapcase()[::-1]


@pytest.mark.parametrize("command", ["plan", "validate", "submit --dry-run"])
@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('env:\n  ACCESS: "${API_TOKEN}"\n', "cloudtrain.yaml:4:11, env.ACCESS looks secret"),
        ('env: {TOKEN: "${API_TOKEN}"}\n', "cloudtrain.yaml:3:14, env.TOKEN looks secret"),
        ("env: {DB_PASSWORD: open sesame}\n", "write `secrets: [DB_PASSWORD]` and export DB_PASSWORD"),
        ('args: [--key, "${API_TOKEN}"]\n', "cloudtrain.yaml:3:15, args.1 looks secret"),
    ],
)
def test_secret_in_clear_has_a_warning(
    cli: Cli, project: Callable[..., Path], command: str, lines: str, said: str
) -> None:
    """The warning names file, line and key and prints no value; the exit code stays 0."""
    done = cli(*command.split(), cwd=project(lines), env={"API_TOKEN": "s3cret-value"})
    out = " ".join((done.stdout if command == "plan" else done.stderr).split())
    assert (done.code, said in out, "in clear" in out) == (0, True, True), out
    assert TOKEN not in done.stderr
    assert "s3cret-value" not in done.stderr


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (f"env: {{HUB: {TOKEN}}}\n", "cloudtrain.yaml:3:12, env.HUB holds a Hugging Face token"),
        (f"args: {{hub: {TOKEN}}}\n", "cloudtrain.yaml:3:13, args.hub holds a Hugging Face token"),
        (f"args: [--hub={TOKEN}]\n", "the script reads the variable"),
    ],
)
def test_token_in_an_uploaded_config_is_refused(cli: Cli, project: Callable[..., Path], lines: str, said: str) -> None:
    """Both commands refuse a file that is uploaded with the code, and warn if the file is ignored."""
    folder = project(lines)
    for command in (["validate"], ["submit", "--dry-run"]):
        (folder / ".cloudtrainignore").write_text("")
        refused = cli(*command, cwd=folder)
        assert (refused.code, "at cloudtrain.yaml:3:" in refused.stderr) == (3, True), refused.stderr
        (folder / ".cloudtrainignore").write_text("cloudtrain.yaml\n")
        done = cli(*command, cwd=folder)
        assert (done.code, said in " ".join(done.stderr.split()), TOKEN in done.stderr) == (0, True, False), done.stderr


def test_plain_values_have_no_warning(cli: Cli, project: Callable[..., Path]) -> None:
    """Ordinary variables and arguments cause no warning, also with `token` or `key` in their names."""
    lines = 'env: {SAME: "3", HF_PASSWORD: "3"}\n'
    same = cli("validate", cwd=project(lines, folder="same")).stderr
    assert (same.count("in clear"), same.count("env.HF_PASSWORD")) == (1, 1)
    lines = 'env: {TOKENIZERS_PARALLELISM: "false", WHERE: "${HOME}", HF_TOKEN: ""}\n'
    lines += "args: {max_tokens: 128, sort-key: length, token: true}\n"
    done = cli("validate", cwd=project(lines))
    assert (done.code, "in clear" in done.stderr) == (0, False), done.stderr


def test_secret_in_an_option_has_a_warning_without_a_place(cli: Cli, project: Callable[..., Path]) -> None:
    """A value from `--set` has no place in the file."""
    done = cli("plan", "--set", f"env.HUB={TOKEN}", cwd=project("env: {HUB: plain}\n"))
    assert "env.HUB holds a Hugging Face token" in done.stdout
    assert "cloudtrain.yaml:3" not in done.stdout
