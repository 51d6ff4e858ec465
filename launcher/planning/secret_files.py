"""Secrets in the code folder and in the config: found by name, and by the shape of tokens in a text.

The names follow the documentation of the tools that write the files; gitrob's and GitHub's lists served as a check.
The shapes of tokens follow gitleaks 8 (config/gitleaks.toml, MIT licence). A scanner as a dependency was no choice:
detect-secrets 1.5 knows no file names and read 0.2 MB a second of trl's code, gitleaks is a Go program.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints import foreign
from cloudtrain.entrypoints.notices.receivers import RECEIVERS

from ..errors import Fault, Place

if TYPE_CHECKING:
    from ..config.schema import JobConfig
    from ..config.yamlfile import KeyPath, YamlNode

# Most bytes searched of a file, and of a folder, smallest files first. The bounds count bytes, not seconds: two submits
# of one folder end alike. 16 MB take 0.3 s of processor time; gzip takes 0.8 s for the same bytes.
FILE_BYTES, FOLDER_BYTES = 1_000_000, 16_000_000
_TOGETHER = 1 << 18  # bytes of files that are searched at once

_FOLDERS = {".aws", ".azure", ".ssh", ".kube", ".gnupg", ".oci", ".kaggle", ".password-store"}
_GCLOUD = "/.config/gcloud/"
_PATHS = (
    *("/.config/gh/hosts.yml", "/.docker/config.json", "/.gem/credentials", "/.huggingface/token"),
    *("/.huggingface/stored_tokens", "/huggingface/token", "/huggingface/stored_tokens"),
)
_NAMES = {
    *(".env", ".envrc", ".netrc", "_netrc", ".pypirc", ".npmrc", ".git-credentials", ".htpasswd", ".boto", ".s3cfg"),
    *(".pgpass", "pgpass.conf", ".my.cnf", ".mylogin.cnf", "pip.conf", "pip.ini", "rclone.conf", ".vault-token"),
    *(".dockercfg", ".dockerconfigjson", ".databrickscfg", ".passwd-s3fs", ".terraformrc", "terraform.rc"),
    *("kubeconfig", "kaggle.json", "credentials", ".credentials", "credentials.toml", "credentials.csv"),
    *("credentials.json", "credentials.yaml", "credentials.yml", "token.json", "application_default_credentials.json"),
    *("secrets.yaml", "secrets.yml", "secrets.json", "secrets.toml", "secrets.ini", "rootkey.csv", "accesskeys.csv"),
    *("msal_token_cache.json", "accesstokens.json", ".bash_history", ".zsh_history", ".python_history"),
}
_PATTERN = re.compile(
    r"\.env\..*|.*\.env|id_(rsa|dsa|ecdsa|ed25519)([_.-].*)?|.*_(rsa|dsa|ecdsa|ed25519)|"
    r"service[-_]account.*|client_secret.*\.json|.*-firebase-adminsdk-.*\.json|.*_(accesskeys|credentials)\.csv|"
    r"((gcp|gcloud|google|aws|azure|sa|svc|service|api|access|private|secret)[-_])+keys?\.json|"
    r".*\.(pem|key|ppk|p8|p12|pfx|pkcs12|keytab|kdbx?|jks|keystore|ovpn|publishsettings)|.*\.tfstate|.*\.tfvars(\.json)?"
)
_COPY = re.compile(r"(~|\.(bak|backup|old|orig|save|swp|copy))+$")
_HARMLESS = re.compile(r".*\.(example|sample|template|tmpl|dist|defaults|pub|py|md)|(example|sample|template)\.env")


_PASSWORD, _SIGNATURE, _TOKEN = (f"a {kind} in an address" for kind in ("password", "signature", "token"))
# A password of an example is no secret (`postgres://user:password@localhost/test`), and no reference to a variable.
_RANDOM = r"(?!(?i:%\(|[\w.-]*(?:pass|secret|token|changeme|user|postgres)))([^\s/@:'\"<>${}\\]{9,200})"
# In a requirements file and in the config each secret of an address counts, also a short one or an example's.
_ANY = (
    (_PASSWORD, re.compile(rb"://[^\s/:@'\"<>]{0,100}:[^\s/@'\"<>${}\\]{3,200}@")),
    (_SIGNATURE, re.compile(rb"[?&](?:sig|X-(?:Amz|Goog)-Signature)=[^\s&'\"<>${}]{6,}")),
    (_TOKEN, re.compile(rb"https?://(?=[^\s@:/]*\d)\w{12,200}:?@(?![\w.-]*sentry)")),  # where a user's name stands
    ("a token in a header", re.compile(rb"(?i)\bauthorization: *(?:bearer|basic|token) +[\w.~+/=-]{12,}")),
    (_TOKEN, re.compile(rb"[?&]\w{0,20}(?:token|api_?key|password)=[^\s&'\"<>${}]{6,}", re.IGNORECASE)),
)
_OF_PIP = re.compile(
    r".*(requirements|constraints).*\.(txt|in)|(.*/)?(pyproject\.toml|(environment|conda)[\w-]*\.ya?ml)"
)
_SIGNATURES = {"sig": r"[\w%+/=-]{43,}", "X-Amz-Signature": "[0-9a-f]{64}", "X-Goog-Signature": "[0-9a-fA-F]{64,}"}

# A kind of secret, a fixed part of its text, and its regular expression; a group is the secret in the match.
_SHAPES = [
    (kind, mark.encode(), pattern.encode())
    for kind, mark, pattern in (
        ("a private key", "PRIVATE KEY", r"-----BEGIN[ A-Z0-9]{0,40}PRIVATE KEY(?: BLOCK)?-----[\s\w\\+/=:,-]{64}"),
        *(("an AWS access key", mark, rf"{mark}[A-Z2-7]{{16}}\b") for mark in ("AKIA", "ASIA")),
        ("an AWS secret key", "ecret_access_key", r"(?i:aws_secret_access_key)\W{1,6}[\w/+]{40}(?![\w/+])"),
        ("an AWS secret key", "SECRET_ACCESS_KEY", r"AWS_SECRET_ACCESS_KEY\W{1,6}[\w/+]{40}(?![\w/+])"),
        ("an Azure storage key", "AccountKey=", r"AccountKey=[\w/+]{86}=="),
        ("an Azure client secret", "Q~", r"[\w~.]{3}\dQ~[\w~.-]{31,34}(?![\w~.-])"),
        ("a Google API key", "AIza", r"AIza[\w-]{35}(?![\w-])"),
        *(("a GitHub token", mark, rf"{mark}[0-9A-Za-z]{{36}}") for mark in ("ghp_", "gho_")),
        ("a GitHub token", "github_pat_", r"github_pat_\w{82}"),
        ("a GitLab token", "glpat-", r"glpat-[\w-]{20}"),
        ("a Hugging Face token", "hf_", r"hf_[A-Za-z0-9]{34}(?!\w)"),
        ("a Weights & Biases key", "WANDB_API_KEY", r"WANDB_API_KEY\W{1,6}[0-9a-f]{40}\b"),
        ("a Weights & Biases key", "wandb login", r"wandb login (?:--\S+ )*([0-9a-f]{40})\b"),
        ("a Weights & Biases key", "wandb.login", r"wandb\.login\([^)]{0,40}[0-9a-f]{40}\b"),
        ("an OpenAI key", "T3BlbkFJ", r"sk-[\w-]{20,}T3BlbkFJ[\w-]{20}"),
        ("an Anthropic key", "sk-ant-", r"sk-ant-[a-z0-9]+-[\w-]{80}"),
        *(("a Slack token", mark, rf"{mark}\d{{10,13}}-[\w-]{{20}}") for mark in ("xoxb-", "xoxp-")),
        *(receiver.secret for receiver in RECEIVERS.values() if receiver.secret),
        ("a Stripe key", "sk_live_", r"sk_live_\w{20}"),
        ("a Databricks token", "dapi", r"dapi[0-9a-f]{32}(?![0-9a-z])"),
        ("an npm token", "npm_", r"npm_[0-9A-Za-z]{36}(?!\w)"),
        ("a PyPI token", "pypi-AgEIcHlwaS5vcmc", r"pypi-AgEIcHlwaS5vcmc[\w-]{50}"),
        ("a SendGrid key", "SG.", r"SG\.[\w-]{20,24}\.[\w-]{39,50}(?![\w-])"),
        ("a Vault token", "hvs.", r"hvs\.[\w-]{90}"),
        ("a Terraform token", ".atlasv1.", r"[a-zA-Z0-9]{14}\.atlasv1\.[\w=-]{60}"),
        (_PASSWORD, "://", rf"://[^\s/:@'\"<>]{{0,100}}:{_RANDOM}@(?!localhost|127\.)[\w.\[]"),
        (_TOKEN, "://", r"://(?<=p://|s://)(?<=http://|ttps://)([\w-]{20,200}):?@(?![\w.-]*sentry)[\w-]+\."),
        *((_SIGNATURE, f"{name}=", rf"{name}=({form})") for name, form in _SIGNATURES.items()),
        *(
            (_TOKEN, f"{name}=", rf"[?&]\w{{0,20}}{name}=([\w.~%+/-]{{20,}})")
            for name in ("token", "api_key", "apikey")
        ),
        ("an age key", "AGE-SECRET-KEY-1", r"AGE-SECRET-KEY-1[QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L]{58}"),
    )
]
# Bytes around a mark: a secret that begins less than _STEP bytes behind the mark ends before _AFTER.
_BEFORE, _STEP, _AFTER = 80, 150, 400
_PLACEHOLDER = re.compile(rb"example|placeholder|x{4}|\*{4}|\.{4}|abcdefg|1234567|dummy|fake|your", re.IGNORECASE)
_REFERENCE = re.compile(r"\$\{(\w+)")
_FEWEST = 9  # fewest different characters; below 9 a text has under 3 bits a character (gitleaks' bound): `hf_aaaa...`
_SECRET_VARIABLE = re.compile(
    r"(?:^|_)(?<!(?:PAD|EOS|BOS|UNK|SEP|CLS)_)(?:(?:API|ACCESS|SECRET|PRIVATE|ACCOUNT|AUTH)_?KEY|SECRET|TOKEN|PASSWORD|PASSWD|PAT|WEBHOOK(?:_URL)?)$",
    re.IGNORECASE,
)


_BY_ROLE = "; the job's code reads the variable. An address needs no secret where the job's role or identity has access"
_READERS = {
    "env": "",
    "setup": "; the command reads the variable, as `$NAME`",
    **dict.fromkeys(("args", "resume_args"), "; the script reads the variable"),
}


class Secrets:
    """A search of the files to ship: first of their names, then of their texts by whoever reads them, each once."""

    def __init__(self, folder: Path, sizes: Mapping[str, int], exclude: Iterable[str] = ()) -> None:
        """`sizes` are the files, links among them. `!FILE` in `exclude` or .cloudtrainignore permits a file."""
        self._folder, self._exclude, left = folder, exclude, FOLDER_BYTES
        self._found: dict[str, list[Fault]] = {}
        self._wanted: set[str] = set()
        self._waiting: list[tuple[str, bytes]] = []
        self._bytes = 0
        for name, size in sorted(sizes.items(), key=lambda item: (item[1], item[0])):
            if _looks_secret(name):
                hint = f"add `{name}` to .cloudtrainignore or to code.exclude; pass values through `secrets:`"
                message = f"`{name}` looks like a secret, and would be uploaded with the code"
                self._found[name] = [Fault(message, hint=f"{hint}; {_permit(name)}")]
            elif (searched := min(size, FILE_BYTES)) <= left:
                left -= searched
                self._wanted.add(name)

    def look(self, name: str, data: bytes) -> None:
        """Search the beginning of a file, together with those of the files around it."""
        if name in self._wanted:
            self._waiting.append((name, data[:FILE_BYTES]))
            self._bytes += len(data)
            if self._bytes > _TOGETHER:
                self._search()

    def read(self) -> None:
        """Read and search all files. The bundle reports those that cannot be read; a link has no text."""
        for name in sorted(self._wanted):
            with suppress(OSError):
                file = os.open(f"{self._folder}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    self.look(name, os.read(file, FILE_BYTES))
                finally:
                    os.close(file)

    def faults(self) -> Iterator[Fault]:
        """Yield the faults found so far, none with the secret itself."""
        self._search()
        for name in sorted(self._found.keys() - _permitted(self._folder, self._found, self._exclude)):
            yield from self._found[name]

    def _search(self) -> None:
        """Search all at once for the fixed parts of tokens, which few texts have."""
        together = b"\n".join(data for _, data in self._waiting)
        if shapes := [shape for shape in _SHAPES if shape[1] in together]:
            for name, data in self._waiting:
                if faults := list(_tokens(name, data, shapes)):
                    self._found[name] = faults
        self._waiting, self._bytes = [], 0


def notes_of(config: JobConfig, file: Path) -> Iterator[str]:
    """Yield a warning with file and line for each secret value in the config; `notify` has its own rules."""
    from ..config import schemafaults, yamlfile

    root = None
    with suppress(OSError, UnicodeDecodeError):
        root = _tree(foreign.read(file).decode("utf-8-sig"), os.fspath(file), frozenset(os.environ.items()))
    for key, values in config.model_dump(mode="json", exclude_defaults=True, exclude={"notify", "secrets"}).items():
        # The config holds arguments as a list, the file perhaps as a mapping or text: find an argument by its text.
        by_text = key in ("args", "resume_args")
        leaves = yamlfile.scalars(yamlfile.find(root, (key,)) if root is not None else None, (key,))
        written = {(leaf.text if by_text else path, leaf.text): (path, leaf) for path, leaf in leaves}
        for path, leaf in yamlfile.scalars(yamlfile.from_data(values, Place("")), (key,)):
            value, step = leaf.text, str(path[-1])
            place, node = written.get((value if by_text else path, value), (path, None))
            variables = [*(_REFERENCE.findall(node.shown) if node else ()), _name(path, value, values)]
            variable = next(filter(secret_name, variables), None)
            kind = token_in(value)
            if variable is not None or kind is not None:
                name = step if key == "env" else variable or "NAME"
                where = f"{node.place}, {schemafaults.dotted(place)}" if node else schemafaults.dotted(place)
                what = f"holds {kind}, and is" if kind else "looks secret, and is"
                reads = _READERS.get(key, _BY_ROLE)
                yield f"{where} {what} sent and stored in clear: write `secrets: [{name}]` and export {name}{reads}"


@functools.lru_cache(maxsize=1)  # the candidates of a job have the same file
def _tree(text: str, name: str, environ: frozenset[tuple[str, str]]) -> YamlNode | None:
    from ..config import yamlfile

    return yamlfile.parse(text, name, dict(environ)).root


def _name(path: KeyPath, value: str, values: Any) -> str:
    """Return the name of a value: a variable's, a key's of `raw`, or the option's of a random argument."""
    if path[0] not in ("args", "resume_args"):
        return str(path[-1]) if value and (path[0] == "env" or "raw" in path) else ""
    option, equals, word = value.partition("=")
    option, word = (option, word) if equals else (values[int(path[-1]) - 1], value)
    is_random = option.startswith("--") and re.fullmatch(r"(?=.*\d)[\w~+-]{16,}=*", word)
    return option.strip("-").replace("-", "_").upper() if is_random else ""


def token_in(text: str) -> str | None:
    """Return the kind of the first secret in the text (`a GitHub token`), or None."""
    data = text.encode(errors="replace")
    return next((name for name, _ in (*_found(data), *_any(data))), None)


def _any(data: bytes) -> Iterator[tuple[str, int]]:
    yield from ((kind, match.start()) for kind, pattern in _ANY if (match := pattern.search(data)))


def secret_name(variable: str) -> bool:
    """Return whether the name is a secret variable's: HF_TOKEN is, TOKENIZERS_PARALLELISM is not."""
    return _SECRET_VARIABLE.search(variable) is not None


def _looks_secret(path: str) -> bool:
    whole = f"/{path}".lower()
    *folders, last = whole.split("/")
    if not _FOLDERS.isdisjoint(folders):
        return True
    name = _COPY.sub("", last)
    if whole.endswith(_PATHS) or _GCLOUD in whole:
        return True
    return _HARMLESS.fullmatch(name) is None and (name in _NAMES or _PATTERN.fullmatch(name) is not None)


def _tokens(name: str, data: bytes, shapes: Sequence[tuple[str, bytes, bytes]]) -> Iterator[Fault]:
    is_of_pip = _OF_PIP.fullmatch(name) is not None
    found = list(_found(data, shapes)) if b"\0" not in data[:4096] else []
    for kind, start in found or (_any(data) if is_of_pip else ()):
        line, column = data.count(b"\n", 0, start) + 1, start - data.rfind(b"\n", 0, start)
        hint = f"pass it through `secrets:` and read the variable, or exclude the file; {_permit(name)}"
        if is_of_pip:
            hint = f"write `${{NAME}}` in its place, which pip fills in, and `secrets: [NAME]`; {_permit(name)}"
        yield Fault(f"`{name}` holds {kind}", place=Place(name, line, column, ""), hint=hint)


def _found(data: bytes, shapes: Sequence[tuple[str, bytes, bytes]] = _SHAPES) -> Iterator[tuple[str, int]]:
    """Yield each kind of secret in the data, and the offset of the first match."""
    for kind, mark, pattern in [shape for shape in shapes if shape[1] in data]:
        if (start := _first(data, mark, pattern)) is not None:
            yield kind, start


def _first(data: bytes, mark: bytes, pattern: bytes) -> int | None:
    at = data.find(mark)
    while at >= 0:
        is_inside = pattern.startswith((b"://", b"["))  # of an address
        whole = re.compile((b"" if is_inside else rb"(?<![\w+-])") + pattern)  # cached by re
        for match in whole.finditer(data, max(0, at - _BEFORE), at + _AFTER):
            secret = match[match.lastindex or 0]
            if len(set(secret.replace(mark, b""))) >= _FEWEST and not _PLACEHOLDER.search(secret):
                return match.start()
        at = data.find(mark, at + _STEP)
    return None


def _permit(name: str) -> str:
    return f"`!{name}` in .cloudtrainignore ships it all the same"


def _permitted(folder: Path, names: Iterable[str], exclude: Iterable[str]) -> set[str]:
    """Return the files that a `!` line names exactly; a pattern such as `!*.py` permits no file."""
    lines = [(PurePosixPath(), line) for line in exclude]
    for parent in {parent for name in names for parent in PurePosixPath(name).parents}:
        with suppress(OSError):
            text = foreign.read_text(folder / parent / ".cloudtrainignore")
            lines += [(parent, line) for line in text.split("\n")]
    return {str(parent / line[1:].strip().lstrip("/")) for parent, line in lines if line.startswith("!")}
