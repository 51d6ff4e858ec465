"""A follower of a job: polls the ssh backend for the job's state, and prints a line for each answer.

    python -m doubles.faulttable.poller < ref.json

A line is `{"asked_s", "time_s", "state"}`, with `error` in place of `state` if no host answered.
"""

import json
import sys
import time
from dataclasses import asdict

EVERY_S = 0.3


def main() -> None:
    """Poll until killed."""
    from cloudtrain.backends.ssh.backend import SshBackend
    from cloudtrain.launcher.errors import UnreachableError

    ref = json.load(sys.stdin)
    while True:
        asked_s = time.time()
        try:
            told = {"state": asdict(SshBackend().state(ref))}
        except UnreachableError as error:
            told = {"error": error.message}
        print(json.dumps({"asked_s": asked_s, "time_s": time.time(), **told}), flush=True)
        time.sleep(EVERY_S)


if __name__ == "__main__":
    main()
