"""The `cloudtrain` command: a table of commands, each imported on its call, and the handling of errors."""

from __future__ import annotations

import sys

try:
    import gc

    gc.set_threshold(100_000)  # imports make no garbage: a search after each 700 objects costs 3 % of a start

    import contextlib
    import importlib
    import io
    import os
    import traceback
    from typing import Any

    import click
    from click.shell_completion import CompletionItem

    from .errors import CloudtrainError
    from .text.terminal import ReaderGoneError, print_json, say
except KeyboardInterrupt:  # the imports take most of the first 0.3 s
    sys.stderr.write("\ninterrupted: nothing was sent or changed\n")
    sys.exit(130)

# heading of `cloudtrain --help` -> names with their lines; the module of that name below `commands` holds `command`
SECTIONS = {
    "To begin": {
        "init": "Write a starter project, ready to run.",
        "doctor": "Find the problems of each backend before a submit.",
        "validate": "Check a config file and the code folder.",
        "plan": "Show ranks, batch split, time limit and price.",
        "rehearse": "Run a job here as on the backend, and prove the resume.",
        "selftest": "Prove a job's life on your account, hosts or cluster.",
    },
    "A job's life": {
        "submit": "Submit a job, and follow its log.",
        "stop": "Have a job save and stop.",
        "resume": "Resume from a job's newest checkpoint.",
        "wait": "Wait for jobs to end.",
        "advance": "Send the jobs in line that find machines.",
        "adopt": "Take in running jobs that the registry does not know.",
        "rm": "Remove jobs that have ended, and their files here.",
        "prune": "Remove the jobs that ended long ago.",
    },
    "To look": {
        "status": "Show a job's state, its failure and the next steps.",
        "list": "List jobs, the newest first.",
        "logs": "Print a job's lines.",
        "watch": "Watch jobs live; send alerts and retries.",
        "ui": "Show jobs, their lines and costs on a page in the browser.",
        "report": "Write a report about a job: curves, costs, code, config.",
        "compare": "Lay jobs side by side: config, results, curves.",
        "artifacts": "Fetch a job's output files.",
        "best": "Show the best trial of a sweep, or write its config.",
        "diagnose": "Find the bound of a step: network, data or compute.",
        "exec": "Run a command, or a shell, where a node's ranks run.",
        "hosts": "Show who uses which GPU of your own machines.",
    },
    "After the training": {
        "evaluate": "Test a job's weights on a split that has chosen nothing.",
        "export": "Write a job's model as a checked folder.",
        "serve": "Answer requests with an exported model.",
        "push": "Bring a model folder to machines, a bucket or a folder that serve the model.",
    },
    "Money": {
        "cost": "Show the cost of jobs, by job, month or tag.",
        "budget": "Limit the cost of all jobs together, or of a project.",
        "prices": "Show the prices of machines, and update them.",
    },
    "More": {
        "notify": "Send a test message to the alert channels of a config.",
        "explain": "Explain a key of the config file.",
        "schema": "Print the config file's JSON schema, for editors.",
        "backends": "List the backends.",
        "completion": "Print the shell's completion script, or install it.",
    },
}
COMMANDS = {name: summary for commands in SECTIONS.values() for name, summary in commands.items()}
FIRST = ("init", "doctor", "plan", "submit", "status", "logs", "stop", "resume", "list", "watch")  # in the short help
INTERRUPT_AGAIN_S = 0.01  # between two looks whether the hook of a lost interrupt has ended
ALIASES = {"run": "submit", "render": "submit", "ps": "list", "cancel": "stop", "ssh": "exec"}
_ALL = "cloudtrain.all"  # key in the meta of click's context: `--help --all`
_FURTHER = """A job's exit code is the command's: 0 done, 1 failed, 2 usage, 3 config, 4 credentials, 5 capacity,
6 budget, 7 backend unreachable, 8 no such job, 9 stopped by a user, 124 wait timed out, 130 interrupted (the job
runs on).

JOB is an id, the beginning of an id, a name (its newest job; `rm` and `stop` take ids if several jobs have the name),
or `last`: the newest job of all projects on this machine.

--debug, anywhere, shows the traceback of an error."""


class _Commands(click.Group):
    """Imports a command on its call, so that help and completion stay quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in COMMANDS:
            return None
        try:
            module = importlib.import_module(f"cloudtrain.launcher.commands.{name}")
        except KeyboardInterrupt:
            raise KeyboardInterrupt("nothing was sent or changed") from None
        command: click.Command = module.command
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        words = COMMANDS | {alias: f"is {name}" for alias, name in ALIASES.items()}
        return [CompletionItem(word, help=summary) for word, summary in words.items() if word.startswith(incomplete)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = [*args[1:], "--help"] if args[:1] == ["help"] else args  # `help`, `help submit`, `help --all`
        if {"--all"} < set(args) <= {"--all", "-h", "--help"}:
            ctx.meta[_ALL] = True
            args = ["--help"]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections = SECTIONS if _ALL in ctx.meta else {"Commands": {name: COMMANDS[name] for name in FIRST}}
        for title, commands in sections.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<10}", summary) for name, summary in commands.items()])
        if _ALL in ctx.meta:
            with formatter.section("Aliases"):
                formatter.write_text("run = submit, render = submit --dry-run, ps = list, cancel = stop, ssh = exec")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        more = f"The other {len(COMMANDS) - len(FIRST)} commands, and the exit codes: cloudtrain --help --all"
        for text in _FURTHER.split("\n\n") if _ALL in ctx.meta else (more, "Of a command: cloudtrain COMMAND --help"):
            formatter.write_paragraph()
            formatter.write_text(text.replace("\n", " "))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and args[0] not in ALIASES and not args[0].startswith("-"):
            from .config.foreign_words import instead

            ctx.fail(f"There is no command `{args[0]}`{instead(args, {*COMMANDS, *ALIASES})}")
        return super().resolve_command(ctx, ["submit", "--dry-run", *args[1:]] if args[:1] == ["render"] else args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cloudtrain", prog_name="cloudtrain", message="%(prog)s %(version)s")
def cli() -> None:
    """One config, one command, a distributed PyTorch run: here, on your machines, on the managed clouds."""


def main() -> None:
    """Run the command line and exit with the code that the errors module lists."""
    sys.unraisablehook = _deliver_again
    argv = sys.argv[1:]
    if os.environ.get("_CLOUDTRAIN_COMPLETE"):  # the completion of a shell
        from .completion.candidates import answer

        answer(cli, argv)
        return
    before_dashes = argv.index("--") if "--" in argv else len(argv)
    debug = "--debug" in argv[:before_dashes] or bool(os.environ.get("CLOUDTRAIN_DEBUG"))
    argv = [arg for i, arg in enumerate(argv) if arg != "--debug" or i > before_dashes]
    code = _run(argv, debug, as_json="--json" in argv[:before_dashes])
    gc.freeze()  # the end of the process frees all memory: a search for garbage before costs 10 % of a start
    sys.exit(code)


def _deliver_again(lost: sys.UnraisableHookArgs) -> None:
    """Deliver Ctrl-C again if Python lost the interrupt in a callback, for example of a weak reference at an import.

    The signal comes from a second thread, after the return from this hook: an interrupt inside is lost again.
    """
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    import signal
    import threading
    import time

    main_thread, has_ended = threading.main_thread().ident, [False]
    assert main_thread is not None, "a running thread has an identifier"

    def deliver() -> None:
        while not has_ended[0]:
            time.sleep(INTERRUPT_AGAIN_S)
        signal.pthread_kill(main_thread, signal.SIGINT)

    threading.Thread(target=deliver, daemon=True).start()
    has_ended[0] = True  # no call follows, so Python delivers no signal before the return


def _run(argv: list[str], debug: bool, as_json: bool) -> int:
    try:
        result: Any = cli.main(args=argv, prog_name="cloudtrain", standalone_mode=False)
        sys.stdout.flush()
    except CloudtrainError as error:
        if debug:
            traceback.print_exc()
        say(f"error: {error}")
        return _ended(error.as_json(), as_json)
    except click.ClickException as error:
        shown, hint = io.StringIO(), _whole_number(error)
        if advice := _option(error, argv):  # without the options that are alike in letters alone
            error, hint = click.UsageError(error.message, getattr(error, "ctx", None)), advice
        error.show(shown)
        say(shown.getvalue().rstrip("\n") + (f"\n  hint: {hint}" if hint else ""))
        fields = CloudtrainError(error.format_message(), hint=hint).as_json()
        return _ended({**fields, "exit_code": error.exit_code}, as_json)
    except (click.Abort, KeyboardInterrupt) as error:
        words = (error.__cause__ or error).args  # click makes an Abort of an interrupt
        click.echo(": ".join(["interrupted", *map(str, words)]), err=True)
        return 130
    except (ReaderGoneError, BrokenPipeError):
        # The reader has gone, so no message. (click alone would exit with 1, the code of a failed job.)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        what = f"cloudtrain itself failed: {type(error).__name__}: {error}"
        hint = "this is our fault, not yours; run it again with --debug and report what it prints"
        if debug:
            traceback.print_exc()
        else:
            say(f"error: {what}\n  hint: {hint}")
        return _ended(CloudtrainError(what, hint=hint).as_json(), as_json)
    return result if isinstance(result, int) else 0


def _whole_number(error: click.ClickException) -> str:
    """Return the expected numbers of an option for whole numbers, with an example, else an empty text."""
    param = error.param if isinstance(error, click.BadParameter) else None
    if param is None or not isinstance(param.type, click.IntRange):
        return ""
    least, most = param.type.min, param.type.max
    numbers = f"of at least {least}" if most is None else f"from {least} to {most}"
    return f"expected a whole number {numbers}, such as `{param.opts[-1]} {most or max(2, least or 0)}`"


def _option(error: click.ClickException, argv: list[str]) -> str:
    """Return what to type in place of an unknown option, with its value, or of a script's words; else an empty text."""
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return ""
    from .commands.options import LAUNCHER
    from .config.foreign_words import option_line

    known = {option for param in error.ctx.command.params for option in param.opts}
    program = next((word for word in argv if word.endswith(".py") or LAUNCHER.fullmatch(word)), "")
    is_line, is_extra = LAUNCHER.fullmatch(program), "unexpected extra argument" in error.message
    if is_line and "--file" in known and (is_extra or isinstance(error, click.NoSuchOption)):
        return f"a command line stands behind `--`: cloudtrain {' '.join(argv[:1])} -- {program} ..."
    if program and is_extra:
        return f"arguments of the script stand behind `--`: {program} -- ARGS"
    if not isinstance(error, click.NoSuchOption):
        return ""
    return option_line(error.ctx.info_name or "", error.option_name, argv, known)


def _ended(error: dict[str, Any], as_json: bool) -> int:
    """Print the error as JSON if scripts asked for JSON; return the exit code."""
    if as_json:
        with contextlib.suppress(ReaderGoneError):
            print_json({"error": error})
    return int(error["exit_code"])
