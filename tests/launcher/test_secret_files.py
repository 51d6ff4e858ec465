"""Secrets in files and in the config: refused or warned of by file and line, never printed, permitted by a line."""

import random
import string
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Cli

from cloudtrain.launcher import config as configs
from cloudtrain.launcher.errors import Fault
from cloudtrain.launcher.planning import secret_files
from doubles.signatures import MakeProject

# Files that an attack got past the bundle, and similar names.
SECRET_FILES = (
    *(
        *("prod.env", ".envrc", ".ENV", ".env~", ".env.bak", ".env.production"),
        *("deploy/staging.env", ".docker/config.json"),
    ),
    *(".huggingface/token", ".cache/huggingface/token", "kaggle.json", "application_default_credentials.json"),
    *(".config/gcloud/credentials.db", "home/.config/gcloud/x/y.json", ".config/gh/hosts.yml", "gcp-key.json"),
    *("client_secret_123.apps.googleusercontent.com.json", "kubeconfig", ".boto", ".s3cfg", ".pgpass", ".my.cnf"),
    *("pip.conf", "rclone.conf", ".vault-token", "terraform.tfstate", "terraform.tfstate.backup", "prod.tfvars"),
    *("secrets.json", "secrets.toml", ".streamlit/secrets.toml", "deploy.ppk", "id_ed25519_work", "id_rsa.bak"),
    *("github_ed25519", "Kubeconfig", ".kaggle/kaggle.json", "my_accessKeys.csv", "x-firebase-adminsdk-1.json"),
)
PLAIN_FILES = (
    *(
        *(".env.example", "example.env", "id_rsa.pub", "secrets.py", "docs/secrets.md"),
        *("tokenizer.json", "environment.yml"),
    ),
    *("token.py", "config.json", "hosts.yml", "keys.json", "foreign_key.csv", "prod.tfvars.example", "envs/env.py"),
    *("huggingface/tokenizer/a.py", "token", "ppk.txt", "terraform.tf", "special_tokens_map.json", "pip.txt"),
)


def drawn(count: int, alphabet: str = string.ascii_letters + string.digits, seed: int = 7) -> str:
    """Return random characters from a fixed seed."""
    return "".join(random.Random(seed).choices(alphabet, k=count))


UPPER, HEX = string.ascii_uppercase + "234567", "0123456789abcdef"
BLOCK = "PRIVATE KEY-----"  # in pieces, because the test file must not contain a secret
TOKENS = {
    "a private key": f"-----BEGIN RSA {BLOCK}\n{drawn(64)}\n",
    "an AWS access key": f"AKIA{drawn(16, UPPER)}",
    "an AWS secret key": f"aws_secret_access_key = {drawn(40)}",
    "an Azure storage key": f"AccountKey={drawn(86)}==",
    "an Azure client secret": f"{drawn(3)}8Q~{drawn(33)}",
    "a Google API key": f"AIza{drawn(35)}",
    "a GitHub token": f"ghp_{drawn(36)}",
    "a GitLab token": f"glpat-{drawn(20)}",
    "a Hugging Face token": f"hf_{drawn(34)}",
    "a Weights & Biases key": f"WANDB_API_KEY={drawn(40, HEX)}",
    "an OpenAI key": f"sk-proj-{drawn(60)}T3BlbkFJ{drawn(60)}",
    "an Anthropic key": f"sk-ant-api03-{drawn(93)}AA",
    "a Slack token": f"xoxb-{drawn(11, string.digits)}-{drawn(24)}",
    "a Slack webhook": f"https://hooks.slack.com/services/{drawn(44)}",
    "a Stripe key": f"sk_live_{drawn(24)}",
    "a Databricks token": f"dapi{drawn(32, HEX)}",
    "an npm token": f"npm_{drawn(36)}",
    "a PyPI token": f"pypi-AgEIcHlwaS5vcmc{drawn(60)}",
    "a SendGrid key": f"SG.{drawn(22)}.{drawn(43)}",
    "a Vault token": f"hvs.{drawn(95)}",
    "a Terraform token": f"{drawn(14)}.atlasv1.{drawn(67)}",
    "an age key": f"AGE-SECRET-KEY-1{drawn(58, 'QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L')}",
}


@pytest.fixture
def faults(tmp_path: Path) -> Callable[..., list[Fault]]:
    """Return a function that writes files and returns the faults."""

    def look(files: dict[str, str], exclude: tuple[str, ...] = ()) -> list[Fault]:
        for name, text in files.items():
            path = tmp_path / "tree" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        sizes = {name: len(text) for name, text in files.items()}
        found = secret_files.Secrets(tmp_path / "tree", sizes, exclude)
        found.read()
        return list(found.faults())

    return look


@pytest.mark.parametrize("name", SECRET_FILES)
def test_secret_file_is_found_by_its_name(name: str, faults: Callable[..., list[Fault]]) -> None:
    """The name is enough, in any case of letters, and also for an editor's copy."""
    assert [fault.message.split("`")[1] for fault in faults({name: "x"})] == [name]


@pytest.mark.parametrize("name", PLAIN_FILES)
def test_plain_file_is_not_refused_by_its_name(name: str, faults: Callable[..., list[Fault]]) -> None:
    """Templates, public keys, sources and similar names are shipped."""
    assert faults({name: "x"}) == []


@pytest.mark.parametrize("kind", TOKENS)
def test_token_in_a_file_is_found_with_its_line_and_never_printed(
    kind: str, faults: Callable[..., list[Fault]]
) -> None:
    """The fault names the file, line and column; the message has no part of the secret."""
    secret = TOKENS[kind]
    (fault,) = faults({"src/train.py": f"import os\n\nx = '{secret}'\n"})
    assert fault.message == f"`src/train.py` holds {kind}"
    assert str(fault.place) == "src/train.py:3:6"
    assert not any(secret[at : at + 12] in str(fault) for at in range(4, len(secret) - 12))
    assert secret_files.token_in(f"--key={secret}") == kind


ADDRESSES = {
    f"https://user:{drawn(16, string.ascii_lowercase)}@pypi.corp.example/simple": "a password in an address",
    f"git+https://me:{drawn(20)}@git.corp.example/x.git": "a password in an address",
    f"postgresql://svc:{drawn(12)}%40@db.corp/x": "a password in an address",
    f"https://{drawn(52, UPPER.lower())}@pkgs.dev.azure.com/o/_packaging/f/pypi/simple": "a token in an address",
    f"https://a.blob.core.windows.net/c/x?sv=2024&sig={drawn(43)}%3D": "a signature in an address",
    f"https://b.s3.amazonaws.com/x?X-Amz-Signature={drawn(64, HEX)}": "a signature in an address",
    f"https://host.corp/x?private_token={drawn(24)}": "a token in an address",
    f"https://{drawn(24)}7a:@pypi.corp.example/simple": "a token in an address",
}


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("form", ["x = '{}'", "--extra-index-url {}", '{{"at": "{}", "b": 1}}'])
def test_secret_in_an_address_is_found(address: str, form: str, faults: Callable[..., list[Fault]]) -> None:
    """A password, a token in place of the user, a signature, in any shipped text."""
    (fault,) = faults({"a/b.py": f"# see\n{form.format(address)}\n"})
    assert (fault.message, fault.place and fault.place.line) == (f"`a/b.py` holds {ADDRESSES[address]}", 2)


@pytest.mark.parametrize("file", ["sub/requirements-gpu.txt", "requirements/base.in", "environment.yml"])
def test_each_password_in_a_requirements_file_counts(file: str, faults: Callable[..., list[Fault]]) -> None:
    """There a short password is no example, and the hint has the form that pip fills in."""
    (fault,) = faults({file: "--index-url https://ci:pw1@pypi.corp/simple\n"})
    assert "write `${NAME}` in its place, which pip fills in, and `secrets: [NAME]`" in fault.hint
    assert (
        faults({file: "--index-url https://ci:${PIP_TOKEN}@pypi.corp/simple\na @ git+ssh://git@github.com/a/a\n"}) == []
    )


@pytest.mark.parametrize(
    "text",
    [
        "postgres://user:password@localhost/test, redis://:mypassword@redis:6379",
        "f'postgresql://{user}:{word}@{host}', 'http://%(name)s:%(word)s@x', \"https://${USER}:${WORD_X}@x\"",
        "url = https://files.pythonhosted.org/packages/ab/cd#sha256=0123 see a@b.example or http://localhost:8080/@x",
        "jobs = client.get(f'{url}?token={token}&private_token=' + secret_of_environment)",
        "https://0123456789abcdef0123456789abcdef@o12345.ingest.sentry.io/42",
        "abfss://training-data-2024-prod@corp.dfs.core.windows.net/x and ssh://a-long-deploy-user-7@host.corp/x",
        f"-----BEGIN {BLOCK}",
        f"-----BEGIN {BLOCK}\\n...\\n-----END {BLOCK}",
        "AKIAIOSFODNN7EXAMPLE",
        "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        f"hf_{'x' * 34}",
        f"ghp_{'a' * 36}",
        "WANDB_API_KEY=${WANDB_API_KEY}",
        f"sha {drawn(40, HEX)}",
        "from transformers import hf_argparser",
        f"data:image/png;base64,{drawn(4000)}AIza{drawn(4000, seed=8)}",
    ],
)
def test_placeholder_is_no_secret(text: str, faults: Callable[..., list[Fault]]) -> None:
    """Examples of documentation, references and plain hashes are shipped."""
    assert faults({"a.py": text}) == []


@pytest.mark.parametrize("line", ["!certs/test.pem", "!/certs/test.pem"])
@pytest.mark.parametrize("where", ["exclude", ".cloudtrainignore"])
def test_line_with_a_file_name_permits_the_file(line: str, where: str, faults: Callable[..., list[Fault]]) -> None:
    """The line from the hint permits only the named file; a pattern permits no file."""
    files = {"certs/test.pem": "x", "certs/other.pem": "x", "a.py": TOKENS["a GitHub token"]}
    lines = [line, "!*.pem", "!*.py", "!certs/"]
    if where == ".cloudtrainignore":
        files[where] = "\n".join(lines)
    found = faults(files, tuple(lines) if where == "exclude" else ())
    assert [fault.message.split("`")[1] for fault in found] == ["a.py", "certs/other.pem"]
    assert "`!a.py` in .cloudtrainignore" in found[0].hint


def test_search_is_bounded_in_bytes(faults: Callable[..., list[Fault]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest files are searched up to the limit, names always; placeholders do not hide a later token."""
    text = f"hf_hub hf_{'x' * 34} hf_model\n" * 50 + TOKENS["a Hugging Face token"]
    assert [str(fault.place) for fault in faults({"a.py": text})] == ["a.py:51:1"]
    monkeypatch.setattr(secret_files, "FOLDER_BYTES", 200)
    token = TOKENS["a GitHub token"]
    found = faults({"small.py": token, "large.py": token + " " * 300, "tls.key": "x" * 500})
    assert [fault.message.split("`")[1] for fault in found] == ["small.py", "tls.key"]


def test_submit_refuses_a_token_in_the_code(cli: Cli, project: MakeProject) -> None:
    """A dry run exits with code 3, names all secret files at once, and prints no secret."""
    folder = project()
    (folder / "push.py").write_text(f"login('{TOKENS['a Hugging Face token']}')\n")
    (folder / "prod.env").write_text("A=1\n")
    done = cli("submit", "--dry-run", cwd=folder)
    assert (done.code, "prod.env" in done.stderr, "push.py:1:8" in done.stderr) == (3, True, True)
    assert "at code.exclude" not in done.stderr  # the config has no code.exclude
    assert TOKENS["a Hugging Face token"][3:20] not in done.stderr + done.stdout
    (folder / ".cloudtrainignore").write_text("prod.env\n!push.py\n")
    assert cli("submit", "--dry-run", cwd=folder).code == 0


def test_validate_reports_a_secret_file_with_further_faults(cli: Cli, project: MakeProject) -> None:
    """`validate` refuses a secret file as `plan` does, with the faults of the config, and writes no archive."""
    folder = project("limits: {max_duration: 30}\n")
    (folder / "prod.env").write_text("A=1\n")
    done = cli("validate", cwd=folder)
    assert (done.code, "found the number 30" in done.stderr) == (3, True), done.stderr
    assert "`prod.env` looks like a secret" in done.stderr
    project()
    done = cli("validate", cwd=folder)
    assert (done.code, done.stderr) == (3, cli("plan", cwd=folder).stderr)
    assert not cli.home.exists()


def test_names_of_secret_variables_are_recognised() -> None:
    """A name that merely contains `token` or `key` is plain."""
    secret = ["HF_TOKEN", "TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"]
    plain = ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "PAD_TOKEN", "SORT_KEY", "AUTHOR", "PATH", "COMPAT"]
    assert [name for name in (*secret, *plain) if secret_files.secret_name(name)] == secret


def test_key_in_a_login_is_found() -> None:
    """The command of Weights & Biases takes the key as a word; a login without a key is plain."""
    assert secret_files.token_in(f"wandb login --relogin {drawn(40, HEX)}") == "a Weights & Biases key"
    assert secret_files.token_in("wandb login --relogin && python train.py") is None


TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"[:34].swapcase()[::-1]


@pytest.mark.parametrize("command", ["plan", "validate", "submit --dry-run"])
@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('env:\n  ACCESS: "${API_TOKEN}"\n', "cloudtrain.yaml:4:11, env.ACCESS looks secret"),
        ('env: {TOKEN: "${API_TOKEN}"}\n', "cloudtrain.yaml:3:14, env.TOKEN looks secret"),
        ("env: {DB_PASSWORD: open sesame}\n", "write `secrets: [DB_PASSWORD]` and export DB_PASSWORD"),
        ('args: [--key, "${API_TOKEN}"]\n', "cloudtrain.yaml:3:15, args.1 looks secret"),
        ('setup: ["login ${API_TOKEN}"]\n', "cloudtrain.yaml:3:9, setup.0 looks secret"),
        ('tags: {by: "${API_TOKEN}"}\n', "cloudtrain.yaml:3:12, tags.by looks secret"),
        ("setup: [pip install -i https://a:pw1@corp.example/ x]\n", "setup.0 holds a password in an address"),
        ("setup: [git clone https://Qx7fKd92LmPz@github.com/a/b]\n", "setup.0 holds a token in an address"),
        ("setup: ['curl -H \"Authorization: Bearer Qx7fKd92LmPz\" a']\n", "setup.0 holds a token in a header"),
        ("args: {lr: 1, hub-token: Qx7fKd92LmPz5rTy}\n", "write `secrets: [HUB_TOKEN]` and export HUB_TOKEN"),
        ("args: [--api_key=Qx7fKd92LmPz5rTy]\n", "args.0 looks secret"),
        ("sagemaker: {raw: {Environment: {DB_PASSWORD: a}}}\n", "sagemaker.raw.Environment.DB_PASSWORD looks secret"),
        ("tags: {at: 'https://a:pw1@corp.example/'}\n", "cloudtrain.yaml:3:12, tags.at holds a password"),
    ],
)
def test_secret_in_clear_has_a_warning(cli: Cli, project: MakeProject, command: str, lines: str, said: str) -> None:
    """The warning names file, line and key and prints no value; the exit code stays 0."""
    done = cli(*command.split(), cwd=project(lines), env={"API_TOKEN": "s3cret-value"})
    out = " ".join((done.stdout if command == "plan" else done.stderr).split())
    assert (done.code, said in out, "in clear" in out) == (0, True, True), out
    assert TOKEN not in done.stderr
    assert "s3cret-value" not in done.stderr


SHORT = {  # in a shipped source these are examples
    "https://a:pw1@corp.example/": "a password in an address",
    "https://acc.blob.core.windows.net/c/x?sv=1&sig=abc123%3D": "a signature in an address",
    "https://corp.example/x?access_token=abc123": "a token in an address",
}


@pytest.mark.parametrize(
    ("key", "lines"),
    [
        ("inputs.x", "inputs: {{x: '{}'}}"),
        ("outputs.x", "outputs: {{x: '{}'}}"),
        ("checkpoint.uri", "checkpoint: {{uri: '{}'}}"),
        ("sagemaker.raw.Tags.0.Value", "sagemaker: {{raw: {{Tags: [{{Value: '{}'}}]}}}}"),
        ("setup.0", "setup: ['curl {}']"),
    ],
)
@pytest.mark.parametrize("address", [*SHORT, *ADDRESSES])
def test_secret_in_an_address_of_the_config_has_a_warning(tmp_path: Path, address: str, key: str, lines: str) -> None:
    """Each key that goes into a request; the warning has the place, and no part of the secret."""
    file = tmp_path / "cloudtrain.yaml"
    file.write_text(f"name: a\nscript: a.py\n{lines.format(address)}\n")
    (tmp_path / "a.py").write_text("")
    (warning,) = secret_files.notes_of(configs.load(file), file)
    kind = {**SHORT, **ADDRESSES}[address]
    assert "cloudtrain.yaml:3:" in warning
    assert f", {key} holds {kind}, and is sent and stored in clear" in warning
    assert address[8:20] not in warning


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (f"env: {{HUB: {TOKEN}}}\n", "cloudtrain.yaml:3:12, env.HUB holds a Hugging Face token"),
        (f"args: {{hub: {TOKEN}}}\n", "cloudtrain.yaml:3:13, args.hub holds a Hugging Face token"),
        (f"args: [--hub={TOKEN}]\n", "the script reads the variable"),
    ],
)
def test_token_in_an_uploaded_config_is_refused(cli: Cli, project: MakeProject, lines: str, said: str) -> None:
    """Both commands refuse a file that is uploaded with the code, and warn if the file is ignored."""
    folder = project(lines)
    for command in (["validate"], ["submit", "--dry-run"]):
        (folder / ".cloudtrainignore").write_text("")
        refused = cli(*command, cwd=folder)
        assert (refused.code, "at cloudtrain.yaml:3:" in refused.stderr) == (3, True), refused.stderr
        (folder / ".cloudtrainignore").write_text("cloudtrain.yaml\n")
        done = cli(*command, cwd=folder)
        assert (done.code, said in " ".join(done.stderr.split()), TOKEN in done.stderr) == (0, True, False), done.stderr


def test_plain_values_have_no_warning(cli: Cli, project: MakeProject) -> None:
    """Ordinary names with `token` or `key` cause no warning; a secret of `--set` has no place in the file."""
    lines = 'env: {SAME: "3", HF_PASSWORD: "3"}\n'
    same = cli("validate", cwd=project(lines, folder="same")).stderr
    assert (same.count("in clear"), same.count("env.HF_PASSWORD")) == (1, 1)
    lines = 'env: {TOKENIZERS_PARALLELISM: "false", WHERE: "${HOME}", HF_TOKEN: ""}\n'
    lines += "args: {max_tokens: 128, sort-key: length, token: true}\n"
    done = cli("validate", cwd=project(lines))
    assert (done.code, "in clear" in done.stderr) == (0, False), done.stderr
    done = cli("plan", "--set", f"env.HUB={TOKEN}", cwd=project("env: {HUB: plain}\n"))
    assert "env.HUB holds a Hugging Face token" in done.stdout
    assert "cloudtrain.yaml:3" not in done.stdout
