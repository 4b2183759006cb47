"""The vector environment: values, masks, gathered judge calls; Gymnasium's own ones."""

from __future__ import annotations

import asyncio
import warnings
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import mintrl_env  # noqa: F401 - registers the ids
from mintrl_env.env import PolicyEnv
from mintrl_env.episode import NeedEnvironment
from mintrl_env.errors import JudgeError, UsageError
from mintrl_env.judges import OracleJudge
from mintrl_env.testing import FunctionVerifier, ScriptedJudge
from mintrl_env.types import ReviewRequest, Task, Verdict
from mintrl_env.vector import PolicyVectorEnv
from mintrl_env.wrappers import JudgeIntervention

EOS = 256
TASKS = [
    Task("a", "1+1=\n", answer="2", verifier="last_integer"),
    Task("b", "2+2=\n", answer="4", verifier="last_integer"),
    Task("c", "3+3=\n", answer="6", verifier="last_integer"),
]


def ids(text: str, *, eos: bool = False) -> np.ndarray:
    return np.array([*text.encode(), *([EOS] if eos else [])], dtype=np.int32)


def make(num_envs: int = 3, **kwargs: Any) -> PolicyVectorEnv:
    return PolicyVectorEnv(num_envs, tasks=TASKS, **kwargs)


def start(envs: PolicyVectorEnv, **options: Any) -> tuple[Any, dict[str, Any]]:
    return envs.reset(seed=0, options={"task_id": ["a", "b", "c"][: envs.num_envs], **options})


class TestMade:
    def test_make_vec_without_a_warning(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            envs = gymnasium.make_vec("MinTRL/Policy-v0", num_envs=2, judge="oracle")
            assert isinstance(envs, PolicyVectorEnv)
            assert envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED
            obs, _ = envs.reset(seed=0)
            assert obs in envs.observation_space
            assert envs.action_space.sample() in envs.action_space
            obs, *_ = envs.step(tuple(ids("ab") for _ in range(2)))
            assert obs in envs.observation_space
            assert envs.spec is not None
            assert envs.spec.kwargs["judge"] == "oracle"
            envs.close()
            envs.close()

    def test_sampled_actions_go_through(self) -> None:
        envs = make()
        start(envs)
        envs.action_space.seed(0)
        for _ in range(5):
            *_, terminated, truncated, _ = envs.step(envs.action_space.sample())
            done = terminated | truncated
            if done.any():
                envs.reset(options={"reset_mask": done})

    def test_parts_are_made_once(self) -> None:
        envs = make(3)
        assert len({id(env.tokenizer) for env in envs.envs}) == 1
        assert len({id(env.setup) for env in envs.envs}) == 1
        assert len({id(env) for env in envs.envs}) == 3

    def test_seeds_are_those_of_single_environments(self) -> None:
        envs = PolicyVectorEnv(3)
        _, infos = envs.reset(seed=5)
        single = PolicyEnv()
        wanted = [single.reset(seed=5 + i)[1]["task_id"] for i in range(3)]
        assert infos["task_id"].tolist() == wanted
        _, infos = envs.reset(seed=[7, 5, np.int64(6)])  # type: ignore[list-item]
        assert infos["task_id"].tolist()[1:] == wanted[:2]


class TestStep:
    def test_values(self) -> None:
        envs = make()
        obs, infos = start(envs, control=[False, True, False])
        assert [bytes(o.tolist()) for o in obs] == [b"1+1=\n", b"2+2=\n", b"3+3=\n"]
        assert infos["kind"].tolist() == ["intervened", "control", "intervened"]
        assert infos["max_tokens"].tolist() == [512, 16384, 512]
        obs, rewards, terminated, truncated, infos = envs.step(
            [ids("2", eos=True), ids("so "), ids("5", eos=True)]
        )
        assert obs[1].tolist() == list(b"2+2=\nso ")
        assert rewards.tolist() == [1.0, 0.0, 0.0]
        assert rewards.dtype == np.float64
        assert terminated.tolist() == [True, False, True]
        assert truncated.tolist() == [False, False, False]
        assert infos["score"]["status"].tolist() == ["correct", None, "wrong"]
        assert infos["_score"].tolist() == [True, False, True]
        assert infos["chunk"].tolist() == [(50, EOS), (115, 111, 32), (53, EOS)]

    def test_finished_episodes_are_reset_by_mask(self) -> None:
        envs = make()
        start(envs)
        *_, terminated, truncated, _ = envs.step([ids("2", eos=True), ids("x"), ids("y")])
        with pytest.raises(UsageError, match=r"\[0\] are not running"):
            envs.step([ids("a")] * 3)
        options = {"reset_mask": terminated | truncated, "task_id": "c"}
        obs, infos = envs.reset(options=options)
        assert "reset_mask" in options  # the caller's dict is left as it was
        assert [bytes(o.tolist()) for o in obs] == [b"3+3=\n", b"2+2=\nx", b"3+3=\ny"]
        assert infos["_task_id"].tolist() == [True, False, False]
        obs, *_ = envs.step([ids("a"), ids("b"), ids("c")])
        assert [bytes(o.tolist()) for o in obs] == [b"3+3=\na", b"2+2=\nxb", b"3+3=\nyc"]

    def test_truncated_episodes_are_finished_too(self) -> None:
        envs = make(2, max_response=3)
        start(envs)
        *_, terminated, truncated, _ = envs.step([ids("abc"), ids("ab")])
        assert (terminated.tolist(), truncated.tolist()) == ([False, False], [True, False])
        with pytest.raises(UsageError, match=r"\[0\] are not running"):
            envs.step([ids("a")] * 2)

    def test_judge_calls_run_side_by_side(self) -> None:
        together = asyncio.Barrier(3)  # opens when three reviews are waiting at it

        class Patient:
            async def review(self, request: ReviewRequest) -> Verdict:
                await asyncio.wait_for(together.wait(), 5)
                return Verdict.revise(0, request.task.answer or "")

        envs = make(judge=Patient())
        start(envs)
        obs, *_, infos = envs.step([ids("x")] * 3)
        assert [bytes(o.tolist()) for o in obs] == [b"1+1=\n2", b"2+2=\n4", b"3+3=\n6"]
        assert infos["verdict"].tolist() == ["revise"] * 3

    def test_tools_and_verifiers_run_side_by_side(self) -> None:
        together = asyncio.Barrier(2)

        async def tool(task: Task, need: NeedEnvironment) -> tuple[str, bool]:
            await asyncio.wait_for(together.wait(), 5)
            return "!", True

        verifier = FunctionVerifier(lambda task, text: float(text.endswith("!")))
        envs = make(2, environment=tool, turns=True, verifier=verifier)
        start(envs)
        _, rewards, terminated, *_ = envs.step([ids("x", eos=True)] * 2)
        assert (rewards.tolist(), terminated.tolist()) == ([1.0, 1.0], [True, True])

    def test_one_failing_review_touches_no_other_episode(self) -> None:
        def verdict(request: ReviewRequest) -> Verdict | Exception:
            return JudgeError("server") if request.task.task_id == "b" else Verdict.revise(0, "y")

        envs = make(judge=ScriptedJudge(verdict))
        start(envs)
        *_, infos = envs.step([ids("x")] * 3)
        assert infos["verdict"].tolist() == ["revise", "failed", "revise"]
        assert infos["cause"].tolist() == ["", "server", ""]

    def test_guards_and_controls(self) -> None:
        async def never(request: ReviewRequest, verdict: Verdict) -> Verdict:
            return verdict.kept_by("never", "")

        envs = make(judge=ScriptedJudge(lambda r: Verdict.revise(0, "y")), guards=(never,))
        start(envs, control=[True, False, False])
        *_, infos = envs.step([ids("x")] * 3)
        assert infos["guard"].tolist() == ["", "never", "never"]

    def test_as_wrapped_episodes_one_after_the_other(self) -> None:
        one = make(judge=OracleJudge(reference=_reference))
        two = SyncVectorEnv(
            [partial(_wrapped, task) for task in TASKS], autoreset_mode=AutoresetMode.DISABLED
        )
        start(one)
        two.reset(seed=0)
        for chunk in (ids("no\n\nway\n\n"), ids("2\n\n"), ids("", eos=True)):
            a, b = one.step([chunk] * 3), two.step(tuple([chunk] * 3))
            assert [o.tolist() for o in a[0]] == [o.tolist() for o in b[0]]
            for left, right in zip(a[1:4], b[1:4], strict=True):
                assert left.tolist() == right.tolist()
            assert a[4]["provenance"].tolist() == b[4]["provenance"].tolist()

    def test_trajectories(self) -> None:
        envs = make(2)
        start(envs)
        envs.step([ids("2", eos=True), ids("3", eos=True)])
        rows = envs.trajectories(update=4)
        assert [(r.task_id, r.update, r.rollout, r.reward) for r in rows] == [
            ("a", 4, 0, 1.0),
            ("b", 4, 1, 0.0),
        ]

    def test_render(self) -> None:
        envs = make(2, render_mode="ansi")
        start(envs)
        assert [r.splitlines()[0] for r in envs.render()] == ["[a, intervened]", "[b, intervened]"]


def _reference(task: Task) -> str:
    return f"so\n\n{task.answer}\n\n"


def _wrapped(task: Task) -> gymnasium.Env[Any, Any]:
    return JudgeIntervention(PolicyEnv(tasks=[task]), OracleJudge(reference=_reference))


class TestIllegal:
    def test_one_illegal_action_changes_no_episode(self) -> None:
        envs = make(2, chunk_tokens=2, judge="keep")
        start(envs)
        with pytest.raises(UsageError, match="1 to 2"):
            envs.step([ids("ab"), ids("abc")])
        with pytest.raises(UsageError, match="1 actions for 2"):
            envs.step([ids("ab")])
        obs, *_, infos = envs.step([ids("x"), ids("y")])
        assert [bytes(o.tolist()) for o in obs] == [b"1+1=\nx", b"2+2=\ny"]
        assert infos["reviews_left"].tolist() == [3, 3]

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"reset_mask": np.array([True])}, "reset_mask"),
            ({"reset_mask": np.array([1, 0])}, "reset_mask"),
            ({"reset_mask": np.array([False, False])}, "reset_mask"),
            ({"task_id": ["a"]}, "1 values of task_id for 2"),
            ({"tsk_id": "a"}, "did you mean 'task_id'"),
            ({"task_id": "d"}, "unknown task id"),
        ],
    )
    def test_reset_options(self, options: dict[str, Any], match: str) -> None:
        envs = make(2)
        start(envs)
        with pytest.raises(UsageError, match=match):
            envs.reset(options=options)

    def test_before_the_first_reset(self) -> None:
        envs = make(2)
        with pytest.raises(UsageError, match=r"\[0, 1\] are not running"):
            envs.step([ids("a")] * 2)
        with pytest.raises(UsageError, match="reset"):
            envs.reset(options={"reset_mask": np.array([True, False])})
        with pytest.raises(UsageError, match="3 seeds"):
            envs.reset(seed=[1, 2, 3])
        with pytest.raises(UsageError, match="num_envs"):
            make(0)


class TestGymnasiumsOwn:
    @pytest.mark.parametrize("mode", ["sync", "async"])
    @pytest.mark.parametrize("action", ["ids", "text"])
    def test_sync_and_async(self, mode: str, action: str) -> None:
        arguments = {"shared_memory": False} if mode == "async" else {}
        envs = gymnasium.make_vec(
            "MinTRL/Policy-v0",
            num_envs=2,
            vectorization_mode=mode,
            vector_kwargs={**arguments, "autoreset_mode": AutoresetMode.DISABLED},
            wrappers=[partial(JudgeIntervention, judge="oracle")],
            action=action,
        )
        try:
            _, infos = envs.reset(seed=0)
            single = PolicyEnv()
            wanted = [single.reset(seed=i)[1]["task_id"] for i in range(2)]
            assert infos["task_id"].tolist() == wanted
            actions = ("1\n\n", "22<|eos|>") if action == "text" else (ids("1\n\n"), ids("22"))
            obs, rewards, terminated, _, infos = envs.step(actions)
            assert infos["verdict"].tolist() == ["revise", "revise"]  # the oracle's first step
            assert infos["step"].tolist() == [0, 0]
            assert len(obs) == 2
            assert not terminated.any()
            assert rewards.tolist() == [0.0, 0.0]
            mask = np.array([True, False])
            obs, infos = envs.reset(seed=[5, None], options={"reset_mask": mask})
            assert infos["_task_id"].tolist() == [True, False]
        finally:
            envs.close()
