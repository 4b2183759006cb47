"""`mintrl train` as test_train_ranks.py starts it: the command itself, and what a test has to see or break.

MINTRL_TEST_WEIGHTS   a folder: every process leaves its model's weights there at the end
MINTRL_TEST_FAIL      "RANK HOW": this process fails before the rollouts of update 1: "judge" by an
                      error, "kill" by a signal
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from mintrl_env import cli, training
from mintrl_env.adapters.session import RolloutSession
from mintrl_env.errors import JudgeError

RANK = os.environ.get("RANK", "0")
_go, _groups = training._Run.go, RolloutSession.groups


def go(run: Any) -> dict[str, Any]:
    import torch

    summary = _go(run)
    folder = os.environ.get("MINTRL_TEST_WEIGHTS")
    if folder:
        model = run.trainer.accelerator.unwrap_model(run.trainer.model)
        torch.save(model.state_dict(), Path(folder) / f"rank{RANK}.pt")
    return summary


def groups(session: Any, tasks: Any, **options: Any) -> Any:
    rank, _, how = os.environ.get("MINTRL_TEST_FAIL", "").partition(" ")
    if rank == RANK and options["update"] == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise JudgeError("budget", "the account has no quota")
    return _groups(session, tasks, **options)


training._Run.go = go  # type: ignore[method-assign]
RolloutSession.groups = groups  # type: ignore[method-assign]

if __name__ == "__main__":
    cli.main()
