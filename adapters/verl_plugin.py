"""veRL's plug-in: loss `mintrl`, trainer `mintrl_sync`, and the agent loop's class, in every process.

veRL imports the modules of the entry-point group `verl.plugins` whenever it is imported itself, in
the driver as in each Ray worker, and logs what goes wrong there at DEBUG, which nobody sees. So a
failure is written to stderr and logged as an error before it is raised again.

`VERL_USE_EXTERNAL_MODULES=mintrl_env.adapters.verl_plugin` does the same without the entry point,
and stops veRL where it fails.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version

VERSIONS = (Version("0.9.1"), Version("0.10"))
"""veRL from the first on and before the second: what is overridden is private there."""


def register() -> None:
    """Register with the veRL that is installed; again is harmless.

    Raises:
        RuntimeError: another release of veRL. ImportError: something of it is missing.
    """
    installed = Version(version("verl"))
    if not VERSIONS[0] <= installed < VERSIONS[1]:
        raise RuntimeError(
            f"veRL {installed} is installed; MInTRL's plug-in knows {VERSIONS[0]} to {VERSIONS[1]} "
            'exclusive: pip install "mintrl-env[verl]"'
        )
    from verl.trainer.ppo.core_algos import (
        POLICY_LOSS_REGISTRY,
        register_adv_est,
        register_policy_loss,
    )

    import mintrl_env.adapters.verl_trainer  # noqa: F401 (registers itself)
    from mintrl_env.adapters.verl_names import LOSS_MODE

    leave_value_heads_out()
    taken = POLICY_LOSS_REGISTRY.get(LOSS_MODE)
    if taken not in (None, _loss):  # veRL itself would overwrite it without a word
        raise RuntimeError(f"the policy loss {LOSS_MODE!r} is registered already, by {taken}")
    register_policy_loss(LOSS_MODE)(_loss)
    register_adv_est(LOSS_MODE)(_no_advantage)


def leave_value_heads_out() -> None:
    """Let veRL's actors start beside a TRL that has no value heads any more, such as 1.16.

    Where TRL is installed, veRL patches its AutoModelForCausalLMWithValueHead whenever it builds a
    model, and stops where that is gone. Only critics have such a head, and MInTRL has no critic.
    """
    trl = importlib.util.find_spec("trl")
    if trl is None or trl.origin is None or Version(version("trl")) < Version("1.0"):
        return
    if (Path(trl.origin).parent / "experimental" / "ppo").exists():
        return
    from verl.models.transformers import monkey_patch

    monkey_patch.is_trl_available = lambda: False


def _loss(*args: Any, **kwargs: Any) -> Any:
    """`mintrl_policy_loss`, imported when it is called (see verl_names.py)."""
    from mintrl_env.adapters.verl_loss import mintrl_policy_loss

    return mintrl_policy_loss(*args, **kwargs)


def _no_advantage(*args: object, **kwargs: object) -> None:
    raise RuntimeError(
        "algorithm.adv_estimator=mintrl needs trainer.v1.trainer_mode=mintrl_sync: veRL's own "
        "trainer does not say which rows are controls"
    )


def register_loudly() -> None:
    """`register`, with a failure on stderr and in the log."""
    try:
        register()
    except Exception as error:
        message = f"MInTRL's plug-in for veRL could not be registered: {error}"
        logging.getLogger(__name__).error(message, exc_info=True)
        print(f"{message}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        raise


register_loudly()
