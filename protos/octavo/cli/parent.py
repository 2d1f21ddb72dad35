"""A child's tie to its parent: it must not outlive it, however the parent ends."""

import ctypes
import os
import signal
import sys

# Set in a child's environment to its parent's process id.
DIE_WITH_PARENT = "OCTAVO_DIE_WITH_PARENT"
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux; elsewhere no-op)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have ended before the call: then nobody will send the signal.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
