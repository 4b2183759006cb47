"""Wrappers, one class of tests each; the same script through env and runner is one trajectory."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from mintrl_env.env import PolicyEnv
from mintrl_env.episode import Episode, EpisodeConfig, Finished, NeedChunk, NeedEnvironment
from mintrl_env.errors import JudgeError, RegistryError, UsageError
from mintrl_env.guards import LeakGuard
from mintrl_env.judges import KeepJudge, OracleJudge
from mintrl_env.keys import RowKey
from mintrl_env.prompts import ByteTokenizer
from mintrl_env.protocols import Sampling
from mintrl_env.rollout import Parts, RolloutConfig, drive
from mintrl_env.testing import FunctionVerifier, ScriptedJudge, ScriptedPolicy
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import (
    Chunk,
    Kind,
    Outcome,
    ReviewRequest,
    StopReason,
    Task,
    Turn,
    Usage,
    Verdict,
)
from mintrl_env.wrappers import (
    GuardWrapper,
    InterventionBudget,
    JudgeIntervention,
    RecordTrajectories,
    ToolFailure,
)

EOS = 256
TASK = Task("t", "2+3=\n", answer="5", verifier="last_integer", context="2+3 = 5\n\n")


def ids(text: str, *, eos: bool = False) -> np.ndarray:
    return np.array([*text.encode(), *([EOS] if eos else [])], dtype=np.int32)


def base(**kwargs: Any) -> PolicyEnv:
    kwargs.setdefault("tasks", [TASK])
    return PolicyEnv(**kwargs)


def text_of(obs: np.ndarray) -> str:
    return ByteTokenizer().decode(obs)


def records(env: gymnasium.Env[Any, Any]) -> list[Any]:
    return list(env.unwrapped.episode.reviews)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda env: JudgeIntervention(env, "keep"),
        lambda env: JudgeIntervention(GuardWrapper(InterventionBudget(env, 1), "leak"), "oracle"),
        lambda env: ToolFailure(env, 0.5),
        lambda env: RecordTrajectories(env, []),
    ],
)
def test_check_env_of_a_wrapped_environment_warns_of_the_wrapping_alone(wrap: Any) -> None:
    env = wrap(gymnasium.make("MinTRL/Policy-v0").unwrapped)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_env(env)
    assert [str(w.message).count("different from the unwrapped version") for w in caught] == [1]


def test_a_wrapped_environment_is_made_again_from_its_spec() -> None:
    env = gymnasium.make("MinTRL/Policy-v0")
    env = JudgeIntervention(InterventionBudget(GuardWrapper(env, "leak"), 2), "oracle")
    assert env.spec is not None
    spec = gymnasium.envs.registration.EnvSpec.from_json(env.spec.to_json())
    again = gymnasium.make(spec)
    assert isinstance(again, JudgeIntervention)
    assert isinstance(again.judge, OracleJudge)
    assert isinstance(again.env, InterventionBudget)
    assert again.env.max_revises == 2
    assert isinstance(again.env.env, GuardWrapper)
    assert isinstance(again.env.env.guard, LeakGuard)


def test_wrapped_environments_pickle() -> None:
    rows: list[Trajectory] = []
    env = RecordTrajectories(JudgeIntervention(base(), OracleJudge2()), rows)
    env.reset(seed=0)
    twin = pickle.loads(pickle.dumps(env))
    for one in (env, twin):
        obs, *_ = one.step(ids("2+3 = 6\n\n"))
        assert text_of(obs) == "2+3=\n2+3 = 5\n\n"


class OracleJudge2(ScriptedJudge):
    """A judge of this module, so that it pickles (OracleJudge holds a lambda)."""

    def __init__(self) -> None:
        super().__init__([Verdict.revise(0, "2+3 = 5\n\n")])


class TestJudgeIntervention:
    def test_values_of_keep_and_revise(self) -> None:
        judge = ScriptedJudge([Verdict.keep("fine"), Verdict.revise(1, "5", reason="sum")])
        env = JudgeIntervention(base(), judge)
        env.reset(seed=0)
        obs, _, _, _, info = env.step(ids("so\n\n"))
        assert text_of(obs) == "2+3=\nso\n\n"
        assert (info["verdict"], info["reason"], info["reviews_left"]) == ("keep", "fine", 3)
        obs, reward, terminated, _, info = env.step(ids("is\n\n6", eos=True))
        assert text_of(obs) == "2+3=\nso\n\nis\n\n5"
        assert (reward, terminated) == (0.0, False)  # a Revise drops an EOS
        assert (info["verdict"], info["step"], info["dropped"]) == ("revise", 1, 2)
        obs, reward, terminated, *_ = env.step(ids("", eos=True))
        assert (reward, terminated) == (1.0, True)
        assert [r.accepted_text for r in judge.requests] == ["", "so\n\n", "so\n\nis\n\n5"]

    def test_a_control_is_never_reviewed(self) -> None:
        judge = ScriptedJudge([])
        env = JudgeIntervention(base(), judge)
        env.reset(seed=0, options={"control": True})
        env.step(ids("5", eos=True))
        assert judge.requests == []
        assert records(env) == []

    def test_no_review_is_asked_after_the_last(self) -> None:
        judge = ScriptedJudge([])
        env = JudgeIntervention(base(max_reviews=1, chunk_tokens=3, max_response=9), judge)
        env.reset(seed=0)
        assert env.step(ids("abc"))[4]["max_tokens"] == 6  # all that is left of T
        env.step(ids("def"))
        assert len(judge.requests) == 1

    @pytest.mark.parametrize(
        ("verdict", "outcome", "cause", "guard"),
        [
            (JudgeError("timeout", "slow"), Outcome.FAILED, "timeout", ""),
            (JudgeError("unparsed"), Outcome.UNPARSED, "unparsed", ""),
            (KeyError("bug"), Outcome.FAILED, "internal", ""),
            (UsageError("bug"), Outcome.FAILED, "internal", ""),
            (Verdict.revise(7, "x"), Outcome.UNPARSED, "bad_step", ""),
            (Verdict.revise(0, [EOS]), Outcome.GUARDED, "", "special_token"),
            (Verdict.revise(0, [300]), Outcome.GUARDED, "", "special_token"),
        ],
    )
    def test_whatever_goes_wrong_is_a_recorded_keep(
        self, verdict: Any, outcome: Outcome, cause: str, guard: str
    ) -> None:
        env = JudgeIntervention(base(), ScriptedJudge([verdict]))
        env.reset(seed=0)
        obs, _, _, _, info = env.step(ids("abc"))
        assert text_of(obs) == "2+3=\nabc"
        review = records(env)[0]
        assert (review.outcome, review.cause, review.guard) == (outcome, cause, guard)
        assert info["reviews_left"] == 3

    def test_a_judge_that_answers_nonsense(self) -> None:
        class Nonsense:
            async def review(self, request: ReviewRequest) -> Any:
                return "keep"

        env = JudgeIntervention(base(), Nonsense())
        env.reset(seed=0)
        info = env.step(ids("abc"))[4]
        assert (info["verdict"], info["cause"]) == ("failed", "internal")
        assert "str" in info["reason"]

    def test_what_a_review_cost_is_recorded_even_if_it_was_refused(self) -> None:
        spent = Usage(prompt_tokens=7, completion_tokens=2)
        env = JudgeIntervention(base(), ScriptedJudge([Verdict.revise(9, "x", usage=spent)]))
        env.reset(seed=0)
        env.step(ids("abc"))
        assert records(env)[0].usage == spent

    def test_an_illegal_chunk_reaches_no_judge(self) -> None:
        judge = ScriptedJudge([])
        env = JudgeIntervention(base(chunk_tokens=2), judge)
        env.reset(seed=0)
        with pytest.raises(UsageError, match="1 to 2"):
            env.step(ids("abc"))
        assert judge.requests == []

    def test_a_turn_that_was_reviewed_is_left_alone(self) -> None:
        judge = ScriptedJudge([])
        env = JudgeIntervention(base(), judge)
        env.reset(seed=0)
        info = env.step(Turn(Chunk(ids("abc")), Verdict.keep("by hand")))[4]
        assert (info["reason"], judge.requests) == ("by hand", [])

    def test_two_judges_are_compared_by_swapping_one_wrapper(self) -> None:
        inner = base()
        chunk = ids("2+3 = 6\n\nAnswer: 6", eos=True)
        for judge, left in ((KeepJudge(), "2+3 = 6\n\nAnswer: 6"), (OracleJudge(), "2+3 = 5\n\n")):
            env = JudgeIntervention(inner, judge)
            env.reset(seed=0)
            env.step(chunk)
            assert inner.episode.text == left

    def test_names(self) -> None:
        assert isinstance(JudgeIntervention(base(), "keep").judge, KeepJudge)
        with pytest.raises(RegistryError, match="oracle"):
            JudgeIntervention(base(), "oracel")
        with pytest.raises(UsageError, match="arguments"):
            JudgeIntervention(base(), "shuffled")

    def test_other_environments_are_refused_by_name(self) -> None:
        env = JudgeIntervention(gymnasium.make("CartPole-v1"), KeepJudge())
        env.reset(seed=0)
        with pytest.raises(UsageError, match="MinTRL/Policy-v0"):
            env.step(0)

    def test_inside_a_notebooks_loop(self) -> None:
        async def cell() -> str:
            env = JudgeIntervention(base(), OracleJudge())
            env.reset(seed=0)
            return text_of(env.step(ids("2+3 = 6\n\n"))[0])

        assert asyncio.run(cell()) == "2+3=\n2+3 = 5\n\n"


class TestGuardWrapper:
    def test_it_turns_a_revise_into_a_keep_and_the_review_is_spent(self) -> None:
        async def never(request: ReviewRequest, verdict: Verdict) -> Verdict:
            return verdict.kept_by("never", f"not {verdict.correction!r}")

        env = JudgeIntervention(
            GuardWrapper(base(), never), ScriptedJudge([Verdict.revise(0, "x")])
        )
        env.reset(seed=0)
        obs, _, _, _, info = env.step(ids("abc"))
        assert text_of(obs) == "2+3=\nabc"
        assert (info["verdict"], info["guard"], info["reason"]) == ("guarded", "never", "not 'x'")
        assert info["reviews_left"] == 3

    def test_it_sees_revises_alone(self) -> None:
        seen: list[int | None] = []

        async def spy(request: ReviewRequest, verdict: Verdict) -> Verdict:
            seen.append(verdict.step)
            return verdict

        judge = ScriptedJudge(
            [Verdict.keep(), JudgeError("server"), Verdict.revise(5), Verdict.revise(0, "x")]
        )
        env = JudgeIntervention(GuardWrapper(base(), spy), judge)
        env.reset(seed=0)
        for _ in range(4):
            env.step(ids("abc"))
        assert seen == [0]
        env.reset(seed=0, options={"control": True})
        env.step(ids("abc"))
        assert seen == [0]

    def test_the_outermost_guard_comes_first_and_a_keep_ends_the_round(self) -> None:
        order: list[str] = []

        def guard(name: str, keeps: bool) -> Any:
            async def look(request: ReviewRequest, verdict: Verdict) -> Verdict:
                order.append(name)
                return verdict.kept_by(name, "") if keeps else verdict

            return look

        env: gymnasium.Env[Any, Any] = base()
        for name, keeps in (("third", False), ("second", True), ("first", False)):
            env = GuardWrapper(env, guard(name, keeps))
        env = JudgeIntervention(env, ScriptedJudge([Verdict.revise(0, "x")]))
        env.reset(seed=0)
        assert env.step(ids("abc"))[4]["guard"] == "second"
        assert order == ["first", "second"]

    def test_a_guard_that_fails_is_a_recorded_keep(self) -> None:
        async def broken(request: ReviewRequest, verdict: Verdict) -> Verdict:
            raise RuntimeError("no scorer")

        spent = Usage(completion_tokens=3)
        judge = ScriptedJudge([Verdict.revise(0, "x", usage=spent)])
        env = JudgeIntervention(GuardWrapper(base(), broken), judge)
        env.reset(seed=0)
        info = env.step(ids("abc"))[4]
        assert (info["verdict"], info["cause"]) == ("failed", "internal")
        assert info["reason"] == "RuntimeError: no scorer"
        assert records(env)[0].usage == spent

    def test_by_name_with_the_policys_tokenizer(self) -> None:
        env = GuardWrapper(base(), "leak")
        assert isinstance(env.guard, LeakGuard)
        wrapped = JudgeIntervention(env, ScriptedJudge([Verdict.revise(0, "it is 5")]))
        wrapped.reset(seed=0)
        assert wrapped.step(ids("it is 6"))[4]["guard"] == "leak"
        with pytest.raises(RegistryError, match="leak"):
            GuardWrapper(base(), "leek")


class TestInterventionBudget:
    def test_past_the_cap_a_revise_is_a_keep(self) -> None:
        judge = ScriptedJudge(lambda request: Verdict.revise(0, "x"))
        env = JudgeIntervention(InterventionBudget(base(), 2), judge)
        env.reset(seed=0)
        infos = [env.step(ids("abc"))[4] for _ in range(4)]
        assert [info["verdict"] for info in infos] == ["revise", "revise", "guarded", "guarded"]
        assert infos[2]["guard"] == "intervention_budget"
        assert infos[3]["reviews_left"] == 0  # R is the episode's own and was spent all the same

    def test_it_counts_anew_in_every_episode(self) -> None:
        judge = ScriptedJudge(lambda request: Verdict.revise(0, "x"))
        env = JudgeIntervention(InterventionBudget(base(), 1), judge)
        for _ in range(2):
            env.reset(seed=0)
            assert [env.step(ids("abc"))[4]["verdict"] for _ in range(2)] == ["revise", "guarded"]

    def test_what_a_guard_further_in_keeps_costs_nothing(self) -> None:
        async def never(request: ReviewRequest, verdict: Verdict) -> Verdict:
            return verdict if verdict.correction == "y" else verdict.kept_by("never", "")

        judge = ScriptedJudge(
            [Verdict.revise(0, "x"), Verdict.revise(0, "y"), Verdict.revise(0, "y")]
        )
        env = JudgeIntervention(InterventionBudget(GuardWrapper(base(), never), 1), judge)
        env.reset(seed=0)
        infos = [env.step(ids("abc"))[4] for _ in range(3)]
        assert [i["guard"] for i in infos] == ["never", "", "intervention_budget"]

    def test_a_budget_of_nothing_and_a_wrong_one(self) -> None:
        env = JudgeIntervention(InterventionBudget(base(), 0), ScriptedJudge([Verdict.revise(0)]))
        env.reset(seed=0)
        assert env.step(ids("abc"))[4]["verdict"] == "guarded"
        for wrong in (-1, 1.5, True):
            with pytest.raises(UsageError, match="max_revises"):
                InterventionBudget(base(), wrong)  # type: ignore[arg-type]


class TestToolFailure:
    calls: list[str]

    def make(self, probability: float) -> ToolFailure:
        self.calls = []

        async def tool(task: Task, need: NeedEnvironment) -> tuple[str, bool]:
            self.calls.append(need.text)
            return "ok", False

        return ToolFailure(base(environment=tool, turns=True), probability, "failed")

    def test_values_at_0_and_1(self) -> None:
        for probability, answer, calls in ((0.0, "ok", ["x"]), (1.0, "failed", [])):
            env = self.make(probability)
            env.reset(seed=0)
            obs = env.step(ids("x", eos=True))[0]
            assert text_of(obs).endswith(f"<|eos|>{answer}")
            assert self.calls == calls

    def test_a_seed_repeats_the_failures_at_about_the_given_rate(self) -> None:
        env = self.make(0.25)

        def run(seed: int) -> list[bool]:
            env.reset(seed=seed)
            return [text_of(env.step(ids("x", eos=True))[0]).endswith("failed") for _ in range(200)]

        one = run(1)
        assert run(1) == one != run(2)
        assert 30 <= sum(one) <= 70  # 50 +- 3.3 standard deviations

    def test_a_failure_does_not_outlive_its_step(self) -> None:
        env = self.make(1.0)
        env.reset(seed=0)
        env.step(ids("no turn ends here"))
        env.probability = 0.0
        assert text_of(env.step(ids("x", eos=True))[0]).endswith("ok")
        env.probability = 1.0
        with pytest.raises(UsageError):
            env.step(np.array([EOS, 1]))
        env.probability = 0.0
        assert text_of(env.step(ids("y", eos=True))[0]).endswith("ok")

    def test_a_wrong_probability(self) -> None:
        with pytest.raises(UsageError, match=r"\[0, 1\]"):
            self.make(1.5)


class TestRecordTrajectories:
    def test_finished_episodes_go_to_a_list_numbered_by_task(self) -> None:
        rows: list[Trajectory] = []
        other = Task("u", "1+1=\n", answer="2", verifier="last_integer")
        env = RecordTrajectories(base(tasks=[TASK, other]), rows, update=3)
        for task_id in ("t", "u", "t"):
            env.reset(options={"task_id": task_id})
            env.step(ids("so "))
            assert len(rows) < 3
            env.step(ids("5", eos=True))
        assert [(r.task_id, r.update, r.rollout, r.reward) for r in rows] == [
            ("t", 3, 0, 1.0),
            ("u", 3, 0, 0.0),
            ("t", 3, 1, 1.0),
        ]
        assert rows[0].ids.tolist() == [*b"so 5", EOS]

    def test_a_function_as_sink_and_no_sink(self) -> None:
        seen: list[str] = []
        env = RecordTrajectories(base(), lambda row: seen.append(row.task_id))
        env.reset(seed=0)
        env.step(ids("5", eos=True))
        env.close()
        assert seen == ["t"]
        with pytest.raises(UsageError, match="sink"):
            RecordTrajectories(base(), 5)  # type: ignore[arg-type]

    def test_what_is_cut_off_from_outside_is_recorded_as_not_valid(self) -> None:
        rows: list[Trajectory] = []
        env = RecordTrajectories(gymnasium.wrappers.TimeLimit(base(), 2), rows)
        env.reset(seed=0)
        env.step(ids("a"))
        assert env.step(ids("b"))[3] is True
        assert (rows[0].stop_reason, rows[0].valid) == (StopReason.DEADLINE, False)
        assert rows[0].ids.tolist() == list(b"ab")
        env.reset()
        env.step(ids("c"))
        env.reset()  # in the middle
        assert (rows[1].stop_reason, rows[1].cause) == (StopReason.ERROR, "reset before its end")
        env.close()  # before the first token: there is no row to keep
        env.close()
        assert len(rows) == 2

    def test_closing_in_the_middle(self) -> None:
        rows: list[Trajectory] = []
        env = RecordTrajectories(base(), rows)
        env.reset(seed=0)
        env.step(ids("a"))
        env.close()
        env.close()
        assert [row.cause for row in rows] == ["closed before its end"]

    def test_reviews_are_in_the_record_whoever_stands_further_out(self) -> None:
        rows: list[Trajectory] = []
        env = JudgeIntervention(
            RecordTrajectories(base(), rows), ScriptedJudge([Verdict.revise(0, "5")])
        )
        env.reset(seed=0)
        env.step(ids("6", eos=True))
        env.step(ids("", eos=True))
        assert rows[0].provenance.tolist() == [1, 0]
        assert rows[0].reviews[0].dropped_ids.tolist() == [54, EOS]


class TestSameAsTheRunner:
    """The same scripted policy and judge through env and runner: one trajectory."""

    def script(self, seed: int) -> tuple[list[Any], list[Any], EpisodeConfig]:
        draw = np.random.default_rng(seed)
        alphabet = list(b"ab\n\n 5") + list("ü".encode())
        chunks = []
        for _ in range(40):
            chunk = [int(i) for i in draw.choice(alphabet, size=draw.integers(1, 13))]
            chunks.append([*chunk, EOS] if draw.random() < 0.25 else chunk)
        verdicts: list[Any] = []
        for _ in range(8):
            kind = draw.choice(["keep", "revise", "revise", "bare", "long", "fail", "eos", "far"])
            step = int(draw.integers(2))
            verdicts.append(
                {
                    "keep": Verdict.keep(),
                    "revise": Verdict.revise(step, "c\n\nü"),
                    "bare": Verdict.revise(step),
                    "long": Verdict.revise(0, "ü" * 40),
                    "fail": JudgeError("timeout"),
                    "eos": Verdict.revise(0, [98, EOS]),
                    "far": Verdict.revise(50, "x"),
                }[str(kind)]
            )
        turns = bool(draw.random() < 0.5)
        config = EpisodeConfig(
            chunk_tokens=int(draw.integers(4, 13)),
            max_reviews=int(draw.integers(1, 7)),
            max_correction=int(draw.integers(1, 12)),
            max_response=int(draw.integers(8, 36)),
            spacing=int(draw.integers(0, 2)) * 3,
            turns=turns,
        )
        return chunks, verdicts, config

    def test_over_many_scripts(self) -> None:
        revised = reviewed = tools = eos_dropped = at_limit = 0
        for seed in range(150):
            chunks, verdicts, config = self.script(seed)
            tool = self.tool if config.turns else None
            verifier = FunctionVerifier(lambda task, text: float(len(text) % 2))
            kind = Kind.CONTROL if seed % 5 == 0 else Kind.INTERVENED

            env = RecordTrajectories(
                JudgeIntervention(
                    base(config=config, environment=tool, verifier=verifier),
                    ScriptedJudge(verdicts),
                ),
                rows := [],
            )
            env.reset(seed=seed, options={"control": kind is Kind.CONTROL})
            episode = env.get_wrapper_attr("episode")
            key: RowKey = episode.key
            policy = ScriptedPolicy(chunks)
            done = False
            while not done:
                need = episode.need
                assert isinstance(need, NeedChunk)
                chunk = asyncio.run(
                    policy.generate(
                        env.get_wrapper_attr("observe")(),
                        max_tokens=need.max_tokens,
                        stop=(),
                        sampling=Sampling(),
                        key=key.at(need.draw),
                    )
                )
                _, _, terminated, truncated, _ = env.step(chunk)
                done = terminated or truncated

            twin = Episode(
                TASK,
                episode.prompt_ids,
                kind=kind,
                tokenizer=ByteTokenizer(),
                config=config,
                key=key,
            )
            parts = Parts(ScriptedPolicy(chunks), ScriptedJudge(verdicts), (), verifier, tool)
            asyncio.run(drive(twin, parts, RolloutConfig(episode=config)))
            wanted = Trajectory.of(twin, update=0, rollout=0)

            assert isinstance(episode.need, Finished)
            for field in dataclasses.fields(Trajectory):
                a, b = getattr(rows[0], field.name), getattr(wanted, field.name)
                if isinstance(a, np.ndarray):
                    assert a.dtype == b.dtype
                    np.testing.assert_array_equal(a, b, err_msg=f"seed {seed}: {field.name}")
                else:
                    assert a == b, f"seed {seed}: {field.name}"

            for review in wanted.reviews:
                reviewed += 1
                revised += review.outcome is Outcome.REVISE
                eos_dropped += EOS in review.dropped_ids.tolist()
            tools += 2 in wanted.provenance.tolist()
            at_limit += len(wanted.ids) == config.max_response and wanted.provenance[-1] == 1
        # What the scripts have to cover.
        assert reviewed > 200
        assert revised >= 0.3 * reviewed
        assert min(tools, eos_dropped, at_limit) >= 5

    @staticmethod
    async def tool(task: Task, need: NeedEnvironment) -> tuple[str, bool]:
        return f"<{len(need.text)}>", len(need.text) % 7 == 6
