"""The driver and the runner: equal to the environment, bounded, and nothing is lost."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mintrl_env.config import parse_config
from mintrl_env.env import PolicyEnv
from mintrl_env.episode import EpisodeConfig, NeedEnvironment
from mintrl_env.errors import (
    ConfigError,
    JudgeError,
    MissingExtraError,
    PolicyError,
    TaskError,
    UsageError,
    VerifierError,
)
from mintrl_env.keys import RowKey, uniforms
from mintrl_env.prompts import ByteTokenizer, PromptBuilder
from mintrl_env.protocols import Sampling
from mintrl_env.rollout import Parts, RolloutConfig, Runner
from mintrl_env.testing import FunctionVerifier, ScriptedJudge, ScriptedPolicy
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import (
    Chunk,
    Kind,
    Outcome,
    Provenance,
    ReviewRequest,
    Score,
    StopReason,
    Task,
    Verdict,
)
from mintrl_env.wrappers import JudgeIntervention, RecordTrajectories

TOKENS = ByteTokenizer()
EOS = TOKENS.EOS
PROMPTS = PromptBuilder(TOKENS)
WORDS = ["ab\n\n", "c d\n\n", "é", "x", "=7\n\n", "\n", "```\n", "yz. "]


def ids(text: str, *, end: bool = False) -> list[int]:
    return TOKENS.encode(text) + [EOS] * end


def scripts(key: RowKey) -> list[list[int]]:
    """A row's chunks, by its draws alone: random text, an EOS now and then, then one at the end."""
    u = uniforms(replace(key, task_id=key.task_id + "/script", draw=0), 64)
    chunks = []
    for i in range(12):
        words = "".join(WORDS[int(x * len(WORDS))] for x in u[5 * i : 5 * i + 4])
        chunks.append(ids(words, end=bool(u[5 * i + 4] < 0.3) or i == 11))
    return chunks


def verdicts(request: ReviewRequest) -> Verdict:
    """At least 30 % Revises: at any step, with empty, short and over-long corrections."""
    key = request.key or RowKey(0, 0, request.task.task_id, 0)
    u = uniforms(replace(key, task_id=f"{key.task_id}/judge", draw=8 * request.review), 4)
    if u[0] < 0.5:
        return Verdict.keep()
    correction = ["", "fix\n\n", "a long correction that is cut", "é"][int(u[2] * 4)]
    return Verdict.revise(int(u[1] * len(request.steps)), correction)


CONFIG = EpisodeConfig(chunk_tokens=12, max_reviews=4, max_correction=9, max_response=40)
TASKS = [Task(f"t{i}", f"problem {i}", answer="1") for i in range(24)]
VERIFIER = FunctionVerifier(lambda task, text: float(len(text) % 2))


def by_runner(
    tasks: Sequence[Task], config: EpisodeConfig, environment: object = None, **options: object
) -> list[Trajectory]:
    parts = Parts(
        ScriptedPolicy(scripts),
        ScriptedJudge(verdicts, latency=lambda r: 0.002 * (len(r.accepted_ids) % 3)),
        (),
        VERIFIER,
        environment,  # type: ignore[arg-type]
    )
    runner = Runner(parts, PROMPTS, RolloutConfig(episode=config, n_control=1, n_intervened=1))
    return [row for rows in asyncio.run(runner.collect(tasks, update=0)) for row in rows]


def by_env(
    tasks: Sequence[Task], config: EpisodeConfig, environment: object = None
) -> list[Trajectory]:
    found: list[Trajectory] = []
    for task in tasks:
        for rollout, control in enumerate((True, False)):
            key = RowKey(0, 0, task.task_id, rollout)
            base = PolicyEnv(
                tasks=[task],
                tokenizer=TOKENS,
                verifier=VERIFIER,
                config=config,
                environment=environment,  # type: ignore[arg-type]
            )
            judge = ScriptedJudge(lambda request, key=key: verdicts(replace(request, key=key)))
            env = RecordTrajectories(JudgeIntervention(base, judge), found.append)
            _, info = env.reset(options={"control": control})
            policy = ScriptedPolicy(scripts)
            done = False
            while not done:
                chunk = asyncio.run(
                    policy.generate(
                        np.array([], np.int32),
                        max_tokens=info["max_tokens"],
                        stop=(),
                        sampling=Sampling(),
                        key=key.at(base.episode.draws),
                    )
                )
                _, _, terminated, truncated, info = env.step(chunk)
                done = terminated or truncated
    return found


async def calculator(task: Task, need: NeedEnvironment) -> tuple[str, bool]:
    """Answers the first turns, then ends the episode."""
    return (f"<{len(need.text)}>", False) if len(need.text) % 4 else ("bye", True)


@pytest.mark.parametrize("turns", [False, True], ids=["plain", "tools"])
def test_environment_and_runner_give_equal_trajectories(turns: bool) -> None:
    config = replace(CONFIG, turns=turns)
    environment = calculator if turns else None
    left, right = (by(TASKS, config, environment) for by in (by_env, by_runner))
    assert len(left) == len(right) == 2 * len(TASKS)
    for a, b in zip(left, right, strict=True):
        assert (a.task_id, a.kind, a.stop_reason, a.score, a.valid, a.draws) == (
            (b.task_id, b.kind, b.stop_reason, b.score, b.valid, b.draws)
        )
        for name in ("prompt_ids", "ids", "provenance", "logprobs"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        for x, y in zip(a.reviews, b.reviews, strict=True):
            np.testing.assert_array_equal(x.dropped_ids, y.dropped_ids)
            assert replace(x, dropped_ids=y.dropped_ids) == y

    # The scripts hold what the rules are hard about.
    reviews = [(row, review) for row in right for review in row.reviews]
    revises = [(row, review) for row, review in reviews if review.outcome is Outcome.REVISE]
    assert len(revises) >= 0.3 * len(reviews) > 10
    assert any(EOS in review.dropped_ids for _, review in revises)
    assert any(review.correction_tokens == 0 for _, review in revises)
    assert any(
        row.stop_reason is StopReason.LENGTH
        and review.cut + review.correction_tokens == len(row.ids)
        and 0 < review.correction_tokens < 4
        for row, review in revises
    ), "no correction was cut by T"
    if turns:
        assert any(row.count(Provenance.ENVIRONMENT) for row in right)
        assert any(row.stop_reason is StopReason.ENVIRONMENT for row in right)
    else:
        assert all(row.count(Provenance.ENVIRONMENT) == 0 for row in right)


def one_runner(parts: Parts, **settings: object) -> Runner:
    config = RolloutConfig(
        episode=CONFIG,
        n_control=1,
        n_intervened=1,
        **settings,  # type: ignore[arg-type]
    )
    return Runner(parts, PROMPTS, config)


def collect(
    runner: Runner, tasks: Sequence[Task] = TASKS[:1], **options: object
) -> list[Trajectory]:
    groups = asyncio.run(runner.collect(tasks, update=0, **options))  # type: ignore[arg-type]
    return [row for rows in groups for row in rows]


class Failing(ScriptedPolicy):
    """Fails the first `times` calls of every row that `which` names, whatever its retry."""

    def __init__(self, times: int, which: int = 1) -> None:
        super().__init__([ids("ok\n\n", end=True)])
        self.times, self.which, self.failed = times, which, 0

    async def generate(self, *args: object, **options: object) -> Chunk:
        key = options["key"]
        if key.rollout == self.which and self.failed < self.times:  # type: ignore[attr-defined]
            self.failed += 1
            raise PolicyError("the engine is gone")
        return await super().generate(*args, **options)  # type: ignore[arg-type]


def test_a_failed_row_is_tried_again_as_a_fresh_episode() -> None:
    rows = collect(one_runner(Parts(Failing(1), verifier=VERIFIER)))
    assert [row.valid for row in rows] == [True, True]
    assert [row.retry for row in rows] == [0, 1]


def test_a_row_that_fails_for_good_is_one_masked_eos_with_its_cause() -> None:
    rows = collect(one_runner(Parts(Failing(9), verifier=VERIFIER)))
    assert len(rows) == 2, "a group is never smaller"
    failed = rows[1]
    assert (failed.valid, failed.stop_reason, failed.kind) == (
        (False, StopReason.ERROR, Kind.INTERVENED)
    )
    assert failed.ids.tolist() == [EOS]
    assert failed.provenance.tolist() == [Provenance.ENVIRONMENT]
    assert failed.cause == "PolicyError: the engine is gone"
    assert not failed.score.decided


def test_the_rules_own_complaints_are_not_hidden_by_retries() -> None:
    too_long = ScriptedPolicy([])
    with pytest.raises(UsageError, match="the script of row"):
        collect(one_runner(Parts(too_long, verifier=VERIFIER)))


def test_a_deadline_ends_a_row_with_what_it_has_and_does_not_hold_up_the_others() -> None:
    class Stuck:
        async def review(self, request: ReviewRequest) -> Verdict:
            await asyncio.sleep(60)
            raise AssertionError

    policy = ScriptedPolicy([ids("ok\n\n", end=True)])
    rows = collect(one_runner(Parts(policy, Stuck(), verifier=VERIFIER), deadline_s=0.2))
    control, stuck = rows
    assert (control.valid, control.stop_reason) == (True, StopReason.EOS)
    assert (stuck.valid, stuck.stop_reason) == (False, StopReason.DEADLINE)
    assert stuck.ids.tolist() == ids("ok\n\n", end=True), "the pending chunk is kept"
    assert "deadline" in stuck.cause
    # A judge that hangs has failed: it is counted as one, so that the run can stop.
    assert [(r.outcome, r.cause) for r in stuck.reviews] == [(Outcome.FAILED, "timeout")]


def test_a_judge_that_always_hangs_stops_the_run() -> None:
    class Stuck:
        async def review(self, request: ReviewRequest) -> Verdict:
            await asyncio.sleep(60)
            raise AssertionError

    policy = ScriptedPolicy([ids("ok\n\n", end=True)])
    runner = one_runner(
        Parts(policy, Stuck(), verifier=VERIFIER), deadline_s=0.1, max_retries=0, min_reviews=3
    )
    with pytest.raises(JudgeError, match="timeout: 4 of 4 reviews failed"):
        collect(runner, TASKS[:4])


def test_the_deadline_covers_all_attempts_at_a_row() -> None:
    class SlowToFail(ScriptedPolicy):
        calls_made = 0

        async def generate(self, *args: object, **options: object) -> Chunk:
            self.calls_made += 1
            await asyncio.sleep(0.15)
            raise PolicyError("the engine is gone")

    policy = SlowToFail([])
    runner = one_runner(Parts(policy, verifier=VERIFIER), deadline_s=0.25, max_retries=50)
    (row,) = collect(runner, rollouts=[[0]])
    assert policy.calls_made == 2
    assert (row.stop_reason, row.retry) == (StopReason.DEADLINE, 1)
    assert row.cause == "PolicyError: the engine is gone", "what used the time up"


def test_a_time_out_of_the_policys_own_is_no_deadline() -> None:
    class TimesOut(ScriptedPolicy):
        async def generate(self, *args: object, **options: object) -> Chunk:
            raise TimeoutError("no answer from the server")

    row = collect(one_runner(Parts(TimesOut([]), verifier=VERIFIER), max_retries=2))[0]
    assert (row.stop_reason, row.retry) == (StopReason.ERROR, 2)
    assert row.cause == "TimeoutError: no answer from the server"


def test_a_deadline_before_the_first_token_gives_a_placeholder() -> None:
    slow = ScriptedPolicy([ids("ok", end=True)], latency=60.0)
    rows = collect(one_runner(Parts(slow, verifier=VERIFIER), deadline_s=0.1))
    assert [row.stop_reason for row in rows] == [StopReason.DEADLINE] * 2
    assert [row.ids.tolist() for row in rows] == [[EOS]] * 2


def failing_judge(cause: str) -> ScriptedJudge:
    return ScriptedJudge(lambda request: JudgeError(cause, "down"))


def test_a_failed_review_is_a_recorded_keep_or_drops_the_row() -> None:
    policy = [ids("ok\n\n", end=True)]
    kept = collect(
        one_runner(Parts(ScriptedPolicy(policy), failing_judge("timeout"), (), VERIFIER))
    )
    assert kept[1].valid
    assert [(r.outcome, r.cause) for r in kept[1].reviews] == [(Outcome.FAILED, "timeout")]
    dropped = collect(
        one_runner(
            Parts(ScriptedPolicy(policy), failing_judge("server"), (), VERIFIER),
            on_judge_failure="drop",
        )
    )
    assert (dropped[1].valid, dropped[1].cause) == (False, "judge: server")
    assert [r.cause for r in dropped[1].reviews] == ["server"], "it is counted as a failure"
    assert dropped[0].valid


def test_what_a_failed_review_does_goes_by_its_cause() -> None:
    asked: list[str] = []

    def rows(cause: str) -> list[Trajectory]:
        def fail(request: ReviewRequest) -> JudgeError:
            asked.append(cause)
            return JudgeError(cause, "401 from judge")

        policy = ScriptedPolicy([ids("ok\n\n", end=True)])
        parts = Parts(policy, ScriptedJudge(fail), (), VERIFIER)
        rule = "keep, unparsed=drop, auth=stop"
        return collect(one_runner(parts, on_judge_failure=rule, max_retries=3))

    kept = rows("timeout")[1]
    assert (kept.valid, [review.cause for review in kept.reviews]) == (True, ["timeout"])
    dropped = rows("unparsed")[1]
    assert (dropped.valid, dropped.cause) == (False, "judge: unparsed")
    with pytest.raises(
        JudgeError, match=r"^auth: '.*401 from judge'; on_failure says stop.*--resume"
    ):
        rows("auth")
    assert asked == ["timeout", "unparsed", "auth"]  # a stop is not tried again


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("", "not ''"),
        ("pause", "keep, drop or stop, not 'pause'"),
        ("keep, auth", "not ''"),
        ("keep, auth=ignore", "not 'ignore'"),
        ("keep, fire=stop", "'fire' in .* is no cause .*timeout.*internal"),
    ],
)
def test_rules_for_failed_reviews_are_checked(rule: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"on_judge_failure: .*{message}"):
        RolloutConfig(on_judge_failure=rule)
    with pytest.raises(ConfigError, match=f"judge.on_failure: .*{message}"):
        parse_config(
            {
                "method": "mintrl-const",
                "policy": {"path": "x"},
                "tasks": {"path": "x"},
                "judge": {"name": "llm", "on_failure": rule},
            },
            "x.yaml",
        )


def test_too_many_failed_reviews_stop_the_run_after_all_groups_came_out() -> None:
    stored: list[Sequence[Trajectory]] = []
    runner = one_runner(
        Parts(ScriptedPolicy([ids("ok\n\n", end=True)]), failing_judge("auth"), (), VERIFIER),
        min_reviews=3,
        max_failure_rate=0.5,
    )
    runner.on_group = stored.append
    with pytest.raises(
        JudgeError, match=r"auth: 4 of 4 reviews failed, 4 of them so: 'auth: down'"
    ):
        collect(runner, TASKS[:4])
    assert len(stored) == 4


@pytest.mark.parametrize("on_failure", ["keep", "drop"])
def test_failed_reviews_of_small_updates_add_up(on_failure: str) -> None:
    runner = one_runner(
        Parts(ScriptedPolicy([ids("ok\n\n", end=True)]), failing_judge("auth"), (), VERIFIER),
        min_reviews=3,
        on_judge_failure=on_failure,
    )
    collect(runner, TASKS[:1])
    collect(runner, TASKS[1:2])
    with pytest.raises(JudgeError, match="3 of 3 reviews failed"):
        collect(runner, TASKS[2:3])


def test_a_few_failures_among_many_reviews_are_forgotten_with_their_batch() -> None:
    answers = iter([JudgeError("server", "x"), *[Verdict.keep()] * 3, JudgeError("server", "x")])
    judge = ScriptedJudge(lambda request: next(answers))
    policy = ScriptedPolicy([ids("ok\n\n", end=True)])
    runner = one_runner(Parts(policy, judge, (), VERIFIER), min_reviews=2, max_failure_rate=0.5)
    collect(runner, TASKS[:4])
    collect(runner, TASKS[4:5])


class RaisingVerifier:
    async def score(self, task: Task, response: str) -> Score:
        raise ConnectionError("the sandbox is gone")


def test_a_verifier_that_fails_leaves_the_response_and_says_why() -> None:
    policy = ScriptedPolicy([ids("ok", end=True)])
    rows = collect(one_runner(Parts(policy, verifier=RaisingVerifier())))
    for row in rows:
        assert (row.valid, row.retry, row.cause) == (False, 0, "unavailable")
        assert row.ids.tolist() == ids("ok", end=True)
        assert row.score.detail == "ConnectionError: the sandbox is gone"


def test_a_verifier_that_always_fails_stops_the_run() -> None:
    policy = ScriptedPolicy([ids("ok", end=True)])
    runner = one_runner(Parts(policy, verifier=RaisingVerifier()), min_reviews=6)
    collect(runner, TASKS[:2])
    with pytest.raises(VerifierError, match=r"6 of 6 trajectories failed.*the sandbox is gone"):
        collect(runner, TASKS[2:3])


def test_a_policy_that_always_fails_stops_the_run() -> None:
    class Gone(ScriptedPolicy):
        async def generate(self, *args: object, **options: object) -> Chunk:
            raise PolicyError("out of memory")

    runner = one_runner(Parts(Gone([]), verifier=VERIFIER), min_reviews=4)
    with pytest.raises(PolicyError, match=r"4 of 4 trajectories failed.*out of memory"):
        collect(runner, TASKS[:2])


def test_bad_gold_answers_are_the_datas_fault_and_stop_nothing() -> None:
    verifier = FunctionVerifier(lambda task, text: Score.undecided("bad_gold"))
    policy = ScriptedPolicy([ids("ok", end=True)])
    rows = collect(one_runner(Parts(policy, verifier=verifier), min_reviews=2), TASKS[:4])
    assert [row.valid for row in rows] == [False] * 8


@pytest.mark.parametrize("answer", [1.0, None, "right", ("right", 1)])
def test_a_verifier_that_answers_no_score_is_a_mistake_that_is_named(answer: object) -> None:
    class Wrong:
        async def score(self, task: Task, response: str) -> Score:
            return answer  # type: ignore[return-value]

    policy = ScriptedPolicy([ids("ok", end=True)])
    with pytest.raises(UsageError, match=r"Wrong.score answered \w+, not a Score: return Score\("):
        collect(one_runner(Parts(policy, verifier=Wrong())))


def test_a_mistake_ends_every_other_row_and_leaves_no_noise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Wrong:
        async def score(self, task: Task, response: str) -> Score:
            raise UsageError("a mistake")

    ended = []

    class Slow(ScriptedPolicy):
        async def generate(self, *args: object, **options: object) -> Chunk:
            if options["key"].rollout:  # type: ignore[attr-defined]
                try:
                    await asyncio.sleep(60)
                finally:
                    ended.append(options["key"].task_id)  # type: ignore[attr-defined]
            return await super().generate(*args, **options)  # type: ignore[arg-type]

    live: list[int] = []
    config = RolloutConfig(episode=CONFIG, n_control=1, n_intervened=1)
    parts = Parts(Slow([ids("ok", end=True)]), verifier=Wrong())
    runner = Runner(parts, PROMPTS, config, on_live=live.append)

    async def run() -> int:
        with pytest.raises(UsageError, match="a mistake"):
            await runner.collect(TASKS[:3], update=0)
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1, "rows run on after the error"
    assert sorted(ended) == ["t0", "t1", "t2"] and live[-1] == 0
    gc.collect()
    assert not caplog.records, "exceptions that nobody looked at"


def test_a_missing_package_is_not_tried_again() -> None:
    class Missing:
        async def score(self, task: Task, response: str) -> Score:
            raise MissingExtraError("sympy", "trl", "the math verifier")

    policy = ScriptedPolicy([ids("ok", end=True)])
    with pytest.raises(MissingExtraError, match="sympy"):
        collect(one_runner(Parts(policy, verifier=Missing())))


def test_nobody_reviews_a_control_or_an_unreviewed_update() -> None:
    judge = ScriptedJudge(lambda request: Verdict.keep())
    parts = Parts(ScriptedPolicy(scripts), judge, (), VERIFIER)
    rows = collect(one_runner(parts), TASKS[:4], reviewed=False)
    assert {row.kind for row in rows} == {Kind.CONTROL}
    assert not judge.requests
    rows = collect(one_runner(replace_policy(parts)), TASKS[:4])
    assert all(not row.reviews for row in rows if row.kind is Kind.CONTROL)
    assert judge.requests


def replace_policy(parts: Parts) -> Parts:
    return Parts(ScriptedPolicy(scripts), parts.judge, parts.guards, parts.verifier)


def test_without_a_verifier_the_score_is_deferred_and_the_row_valid() -> None:
    rows = collect(one_runner(Parts(ScriptedPolicy([ids("ok", end=True)]))))
    assert all(row.valid and row.score.status == "deferred" for row in rows)
    scored = rows[0].with_score(Score(1.0, "rewarded"))
    assert scored.valid and scored.reward == 1.0
    undecided = rows[0].with_score(Score.undecided("unavailable"))
    assert not undecided.valid and undecided.cause == "unavailable"


def test_an_undecided_score_makes_the_row_not_valid() -> None:
    verifier = FunctionVerifier(lambda task, text: Score.undecided("bad_gold"))
    rows = collect(one_runner(Parts(ScriptedPolicy([ids("ok", end=True)]), verifier=verifier)))
    assert [(row.valid, row.cause) for row in rows] == [(False, "bad_gold")] * 2


def test_bad_prompts_and_repeated_tasks_are_refused_before_anything_runs() -> None:
    policy = ScriptedPolicy([ids("ok", end=True)])
    for tasks in ([TASKS[0], TASKS[0]], [TASKS[0], Task("empty", " ")]):
        with pytest.raises(TaskError):
            collect(one_runner(Parts(policy, verifier=VERIFIER)), tasks)
    assert not policy.calls


def test_calls_in_flight_are_bounded_and_live_episodes_are_counted() -> None:
    at_once = [0, 0]
    live: list[int] = []

    class Counting:
        async def review(self, request: ReviewRequest) -> Verdict:
            at_once[0] += 1
            at_once[1] = max(at_once)
            await asyncio.sleep(0.002)
            at_once[0] -= 1
            return Verdict.keep()

    config = RolloutConfig(episode=CONFIG, n_control=1, n_intervened=3, judge_concurrency=2)
    parts = Parts(ScriptedPolicy(scripts), Counting(), (), VERIFIER)
    runner = Runner(parts, PROMPTS, config, on_live=live.append)
    collect(runner, TASKS[:6])
    assert at_once == [0, 2]
    assert live[0] == 24 and live[-1] == 0 and sorted(live, reverse=True) == live


def test_latencies_change_nothing() -> None:
    def rows(seed: int) -> list[Trajectory]:
        u = np.random.default_rng(seed)
        parts = Parts(
            ScriptedPolicy(scripts, latency=lambda key: float(u.random()) * 0.003),
            ScriptedJudge(verdicts, latency=lambda request: float(u.random()) * 0.003),
            (),
            VERIFIER,
        )
        return collect(one_runner(parts), TASKS)

    for a, b in zip(rows(1), rows(2), strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.provenance, b.provenance)


@pytest.mark.parametrize(
    "settings",
    [
        {"n_control": 0, "n_intervened": 0},
        {"n_control": -1},
        {"on_judge_failure": "ignore"},
        {"deadline_s": 0.0},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        RolloutConfig(**settings)  # type: ignore[arg-type]
