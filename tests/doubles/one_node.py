"""The variables by which an agent describes a job of a single node to boot, for tests that start boot themselves."""

import socket


def variables() -> dict[str, str]:
    """Return the variables, with a free port for the ranks' meeting."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    node = {"CLOUDTRAIN_NODE_RANK": "0", "CLOUDTRAIN_NUM_NODES": "1"}
    return {"CLOUDTRAIN_HEAD": f"127.0.0.1:{port}", "CLOUDTRAIN_ADDRESS": "127.0.0.1", **node}
