"""The Ray cluster that a run starts for itself: on loopback alone, and for those alone who know its token."""

import secrets

ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""What makes Ray take 127.0.0.1 for this machine's address, on Linux as well, and listen there and nowhere else."""


def own_cluster() -> dict[str, str]:
    """Environment of all its processes, from their first instruction on: Ray looks when it is imported.

    Each call is another token. Without it Ray runs what anybody on the machine sends to its ports, as this user.
    """
    return ON_LOOPBACK | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
