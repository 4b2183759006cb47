"""The preflight in front of a training: when there is one, what it shows, and what it refuses."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mintrl_env.config import RunConfig
from mintrl_env.console import RunConsole
from mintrl_env.errors import MintrlError
from mintrl_env.metrics import read_metrics
from mintrl_env.preflight import choose_tasks, look, plan_of
from mintrl_env.preflight_servers import asks_service
from mintrl_env.preflight_tables import failures, tables
from mintrl_env.protocols import Verifier
from mintrl_env.run_folder import RunFolder
from mintrl_env.types import Task

if TYPE_CHECKING:
    from mintrl_env.adapters.server_probe import ChatReport
    from mintrl_env.adapters.session import RolloutSession


def wanted(config: RunConfig, asked: bool | None, folder: RunFolder) -> bool:
    """Whether a training in this folder has a preflight first.

    What the command line says wins over the config. A run that goes on has had one, or was begun
    without.
    """
    setting = config.preflight.before_training
    if asked is None:
        asked = asks_service(config) if setting == "auto" else setting == "always"
    return asked and not _has_begun(folder)


def _has_begun(folder: RunFolder) -> bool:
    if not folder.config_file.exists():
        return False
    with contextlib.suppress(OSError, ValueError):
        if json.loads((folder.path / "preflight.json").read_text()).get("passed"):
            return True
    return bool(read_metrics(folder.metrics_file)) or folder.last_checkpoint() is not None


def look_first(
    session: RolloutSession,
    config: RunConfig,
    folder: RunFolder,
    tasks: Sequence[Task],
    *,
    verifier: Verifier,
    evaluation: int,
    probe: int,
    reports: Sequence[ChatReport],
    console: RunConsole,
) -> None:
    """A preflight of a few of the tasks in the trainer's own session.

    Args:
        evaluation, probe: problems in these sets.
        reports: of the judge's servers.

    Raises:
        MintrlError: a check does not hold; the page in the folder shows why.
    """
    figures = look(
        session,
        config,
        choose_tasks(tasks, config.preflight.tasks, config.train.seed),
        folder.path,
        plan=plan_of(config, evaluation=evaluation, probe=probe),
        verifier=verifier,
        reports=reports,
        console=console,
    )
    print_preflight(figures, console)
    if not figures["passed"]:
        reasons = "\n  ".join(failures(figures) or figures["notes"][:1])
        raise MintrlError(
            f"the preflight failed, and nothing was trained:\n  {reasons}\n"
            f"{folder.path}/preflight.html shows what was said; --no-preflight trains all the same"
        )


def print_preflight(figures: Mapping[str, Any], console: RunConsole) -> None:
    """What the judge's server can do, figures, forecast, checks, and what is worth a look.

    What the forecast takes for granted is on the page.
    """
    for server in figures["servers"]:
        console.say(server)
    for table in tables(figures):
        console.console.print(table)
    for line in figures["notes"]:
        console.say(f"note: {line}")
