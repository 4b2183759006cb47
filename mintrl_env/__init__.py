"""MInTRL rollouts as a Gymnasium environment, for trainers, and as pure functions.

    import gymnasium, mintrl_env
    env = gymnasium.make("MinTRL/Policy-v0")

Importing this package registers the environments' ids and loads numpy and gymnasium, nothing else:
the names below are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mintrl_env.env import PolicyEnv as PolicyEnv
    from mintrl_env.episode import Ended as Ended
    from mintrl_env.episode import EnvironmentOutput as EnvironmentOutput
    from mintrl_env.episode import Episode as Episode
    from mintrl_env.episode import EpisodeConfig as EpisodeConfig
    from mintrl_env.episode import Finished as Finished
    from mintrl_env.episode import NeedChunk as NeedChunk
    from mintrl_env.episode import NeedEnvironment as NeedEnvironment
    from mintrl_env.episode import NeedReview as NeedReview
    from mintrl_env.episode import NeedScore as NeedScore
    from mintrl_env.errors import ConfigError as ConfigError
    from mintrl_env.errors import JudgeCause as JudgeCause
    from mintrl_env.errors import JudgeError as JudgeError
    from mintrl_env.errors import MintrlError as MintrlError
    from mintrl_env.errors import MissingExtraError as MissingExtraError
    from mintrl_env.errors import PolicyError as PolicyError
    from mintrl_env.errors import RegistryError as RegistryError
    from mintrl_env.errors import StoreError as StoreError
    from mintrl_env.errors import TaskError as TaskError
    from mintrl_env.errors import UsageError as UsageError
    from mintrl_env.errors import VerifierError as VerifierError
    from mintrl_env.guards import LeakGuard as LeakGuard
    from mintrl_env.guards import SpecialTokenGuard as SpecialTokenGuard
    from mintrl_env.judge_env import JudgeEnv as JudgeEnv
    from mintrl_env.judges import KeepJudge as KeepJudge
    from mintrl_env.judges import OracleJudge as OracleJudge
    from mintrl_env.keys import RowKey as RowKey
    from mintrl_env.prompts import ByteTokenizer as ByteTokenizer
    from mintrl_env.prompts import HFTokenizer as HFTokenizer
    from mintrl_env.prompts import PromptBuilder as PromptBuilder
    from mintrl_env.protocols import Guard as Guard
    from mintrl_env.protocols import Judge as Judge
    from mintrl_env.protocols import Policy as Policy
    from mintrl_env.protocols import Sampling as Sampling
    from mintrl_env.protocols import Scorer as Scorer
    from mintrl_env.protocols import Tokenizer as Tokenizer
    from mintrl_env.protocols import Verifier as Verifier
    from mintrl_env.registry import register as register
    from mintrl_env.rollout import Parts as Parts
    from mintrl_env.rollout import RolloutConfig as RolloutConfig
    from mintrl_env.rollout import Runner as Runner
    from mintrl_env.spaces import TokenIds as TokenIds
    from mintrl_env.spaces import UnicodeText as UnicodeText
    from mintrl_env.store import RolloutStore as RolloutStore
    from mintrl_env.tasks import TaskColumns as TaskColumns
    from mintrl_env.tasks import load_tasks as load_tasks
    from mintrl_env.trajectory import RolloutStats as RolloutStats
    from mintrl_env.trajectory import Trajectory as Trajectory
    from mintrl_env.types import Chunk as Chunk
    from mintrl_env.types import Kind as Kind
    from mintrl_env.types import Outcome as Outcome
    from mintrl_env.types import Provenance as Provenance
    from mintrl_env.types import Review as Review
    from mintrl_env.types import ReviewRequest as ReviewRequest
    from mintrl_env.types import Score as Score
    from mintrl_env.types import StopReason as StopReason
    from mintrl_env.types import Task as Task
    from mintrl_env.types import Turn as Turn
    from mintrl_env.types import Verdict as Verdict
    from mintrl_env.vector import PolicyVectorEnv as PolicyVectorEnv
    from mintrl_env.wrappers import GuardWrapper as GuardWrapper
    from mintrl_env.wrappers import InterventionBudget as InterventionBudget
    from mintrl_env.wrappers import JudgeIntervention as JudgeIntervention
    from mintrl_env.wrappers import RecordTrajectories as RecordTrajectories
    from mintrl_env.wrappers import ToolFailure as ToolFailure

__version__ = "0.1.0"

_MODULES = {
    "env": "PolicyEnv",
    "episode": "Ended EnvironmentOutput Episode EpisodeConfig Finished NeedChunk NeedEnvironment "
    "NeedReview NeedScore",
    "errors": "ConfigError JudgeCause JudgeError MintrlError MissingExtraError PolicyError "
    "RegistryError StoreError TaskError UsageError VerifierError",
    "guards": "LeakGuard SpecialTokenGuard",
    "judge_env": "JudgeEnv",
    "judges": "KeepJudge OracleJudge",
    "keys": "RowKey",
    "prompts": "ByteTokenizer HFTokenizer PromptBuilder",
    "protocols": "Guard Judge Policy Sampling Scorer Tokenizer Verifier",
    "registry": "register",
    "rollout": "Parts RolloutConfig Runner",
    "spaces": "TokenIds UnicodeText",
    "store": "RolloutStore",
    "tasks": "TaskColumns load_tasks",
    "trajectory": "RolloutStats Trajectory",
    "types": "Chunk Kind Outcome Provenance Review ReviewRequest Score StopReason Task Turn "
    "Verdict",
    "vector": "PolicyVectorEnv",
    "wrappers": "GuardWrapper InterventionBudget JudgeIntervention RecordTrajectories ToolFailure",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    thing = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = thing
    return thing


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def register_environments() -> None:
    """Register `MinTRL/Policy-v0` and `MinTRL/Judge-v0`; importing the package does it once."""
    import gymnasium

    for name, entry_point, vector_entry_point in (
        ("MinTRL/Policy-v0", "mintrl_env.env:PolicyEnv", "mintrl_env.vector:PolicyVectorEnv"),
        ("MinTRL/Judge-v0", "mintrl_env.judge_env:JudgeEnv", None),
    ):
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=entry_point, vector_entry_point=vector_entry_point)


register_environments()
