"""How a command ends with an error: one message, and in a run of several processes at once."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

from mintrl_env.errors import MintrlError


def end_with(error: MintrlError) -> NoReturn:
    """Print the error and end with exit status 1.

    Of several processes (torchrun, accelerate launch) each says which it is, tells its launcher why, and
    ends without waiting for anything: the others wait for it in a collective, and the launcher ends
    them once it is gone.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    if world in ("", "1"):
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    rank = os.environ.get("RANK", "?")
    print(f"error (process {rank} of {world}): {error}", file=sys.stderr, flush=True)
    if os.environ.get("TORCHELASTIC_ERROR_FILE") and "torch" in sys.modules:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    exit_now(1)


def is_first() -> bool:
    """Of the processes that a launcher started, does this one speak?"""
    return os.environ.get("RANK", "0") in ("", "0")


def exit_now(status: int) -> NoReturn:
    """Close workers and sandboxes and end, without waiting for threads that wait for something."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)
