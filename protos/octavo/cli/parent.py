"""A child's tie to its parent: it must not outlive it, however the parent ends."""

import ctypes
import os
import signal
import sys
import threading
import time

# Set in a child's environment to its parent's process id.
DIE_WITH_PARENT = "OCTAVO_DIE_WITH_PARENT"
_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0


def die_with_parent(parent_pid: int) -> None:
    """End this process when its parent ends: by the kernel on Linux, elsewhere within a second."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # The parent may have ended before the call: then nobody will send the signal.
        if os.getppid() != parent_pid:
            os.kill(os.getpid(), signal.SIGKILL)
        return
    threading.Thread(target=_watch, args=(parent_pid,), name="parent", daemon=True).start()


def _watch(parent_pid: int) -> None:
    # An orphan gets another parent.
    while os.getppid() == parent_pid:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
