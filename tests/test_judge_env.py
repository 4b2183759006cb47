"""The judge's view: Gymnasium's checks, values by hand, the built-in policy, errors."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env, data_equivalence

import mintrl_env  # noqa: F401 - registers the ids
from mintrl_env.env_defaults import SumPolicy
from mintrl_env.episode import NeedEnvironment
from mintrl_env.errors import PolicyError, RegistryError, UsageError
from mintrl_env.judge_env import JudgeEnv
from mintrl_env.keys import RowKey
from mintrl_env.loops import sync
from mintrl_env.prompts import ByteTokenizer
from mintrl_env.protocols import Sampling
from mintrl_env.testing import ScriptedPolicy
from mintrl_env.types import Outcome, Task, Verdict

EOS = 256
TASK = Task("t", "2+3=\n", answer="5", verifier="last_integer")
KEEP = {"verdict": 0, "step": 0, "correction": ""}


def revise(step: int, correction: Any = "") -> dict[str, Any]:
    return {"verdict": 1, "step": step, "correction": correction}


def make(*chunks: str | list[int], **kwargs: Any) -> JudgeEnv:
    script = [list(c.encode()) if isinstance(c, str) else c for c in chunks]
    return JudgeEnv(tasks=[TASK], policy=ScriptedPolicy(script), **kwargs)


class TestGymnasium:
    @pytest.mark.parametrize(
        "kwargs",
        [{}, {"render_mode": "ansi"}, {"correction": "ids"}, {"chunk_tokens": 7, "max_reviews": 2}],
    )
    def test_check_env_has_nothing_to_say(self, kwargs: dict[str, Any]) -> None:
        env = gymnasium.make("MinTRL/Judge-v0", **kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(env.unwrapped)

    def test_a_seed_repeats_whole_episodes_and_another_does_not(self) -> None:
        env = gymnasium.make("MinTRL/Judge-v0", chunk_tokens=16)

        def run(seed: int) -> list[Any]:
            env.action_space.seed(seed)
            seen: list[Any] = [env.reset(seed=seed)]
            for _ in range(3):
                while True:
                    seen.append(env.step(env.action_space.sample()))
                    if seen[-1][2] or seen[-1][3]:
                        break
                seen.append(env.reset())
            return seen

        assert data_equivalence(run(1), run(1), exact=True)
        assert not data_equivalence(run(1), run(2), exact=True)

    def test_the_spec_is_json(self) -> None:
        env = gymnasium.make("MinTRL/Judge-v0", policy="sums", correction="ids")
        spec = gymnasium.envs.registration.EnvSpec.from_json(env.spec.to_json())  # type: ignore[union-attr]
        again = gymnasium.make(spec)
        assert data_equivalence(env.reset(seed=1), again.reset(seed=1), exact=True)

    def test_sync_and_async_vector_environments(self) -> None:
        for mode, arguments in (("sync", {}), ("async", {"shared_memory": False})):
            envs = gymnasium.make_vec(
                "MinTRL/Judge-v0", num_envs=2, vectorization_mode=mode, vector_kwargs=arguments
            )
            obs, _ = envs.reset(seed=0)
            assert len(obs["steps"]) == 2
            assert obs["reviews_left"].tolist() == [3, 3]
            actions = {
                "verdict": np.array([0, 1]),
                "step": np.array([0, 0]),
                "correction": ("", "1 + 1 = 2\n\n"),
            }
            obs, _, terminated, _, infos = envs.step(actions)
            assert infos["verdict"].tolist() == ["keep", "revise"]
            assert terminated.tolist() == [True, False]
            assert obs["accepted"][1] == "1 + 1 = 2\n\n"
            envs.close()

    def test_pickles_in_the_middle_of_an_episode(self) -> None:
        env = JudgeEnv(chunk_tokens=16)
        env.reset(seed=1)
        twin = pickle.loads(pickle.dumps(env))
        assert data_equivalence(env.step(KEEP), twin.step(KEEP), exact=True)


class TestStep:
    def test_values_of_a_whole_episode(self) -> None:
        env = make("so\n\n2+3=6\n\n", [*b"Answer: 6", EOS], [*b"\n\n5", EOS], max_reviews=3)
        obs, info = env.reset(seed=0)
        assert obs == {
            "task": "2+3=\n",
            "accepted": "",
            "steps": ("so\n\n", "2+3=6\n\n"),
            "reviews_left": 2,
        }
        assert info == {
            "task_id": "t",
            "kind": "intervened",
            "prompt_tokens": 5,
            "reviews_left": 3,
            "tokens_left": 16384,
            "max_tokens": 0,
        }
        obs, reward, terminated, truncated, info = env.step(revise(1, "2+3=5\n\n"))
        assert obs == {
            "task": "2+3=\n",
            "accepted": "so\n\n2+3=5\n\n",
            "steps": ("Answer: 6",),
            "reviews_left": 1,
        }
        assert (reward, terminated, truncated) == (0.0, False, False)
        assert (info["verdict"], info["step"], info["dropped"]) == ("revise", 1, 7)
        assert info["chunk"] == tuple(b"so\n\n2+3=6\n\n")
        assert info["correction"] == tuple(b"2+3=5\n\n")
        assert info["provenance"] == (0,) * 4 + (1,) * 7
        obs, reward, terminated, _, info = env.step(revise(0, "Answer: "))
        assert (obs["steps"], obs["reviews_left"]) == (("\n\n5",), 0)
        obs, reward, terminated, _, info = env.step(KEEP)
        assert obs == {
            "task": "2+3=\n",
            "accepted": "so\n\n2+3=5\n\nAnswer: \n\n5",
            "steps": (),
            "reviews_left": 0,
        }
        assert (reward, terminated) == (1.0, True)
        assert info["score"]["status"] == "correct"

    def test_after_the_last_review_the_policy_goes_on_to_the_end(self) -> None:
        env = make("ab", "cd", [EOS], max_reviews=1, chunk_tokens=2)
        env.reset(seed=0)
        obs, reward, terminated, _, info = env.step(KEEP)
        assert (obs["accepted"], reward, terminated) == ("abcd", 0.0, True)
        assert info["provenance"] == (0,) * 5  # all that was appended, the reviewed chunk and after
        assert info["chunk"] == tuple(b"ab")

    def test_the_policy_is_asked_with_the_episodes_key_and_draws(self) -> None:
        policy = ScriptedPolicy([list(b"abc"), [EOS]])
        env = JudgeEnv(tasks=[TASK], policy=policy, max_response=10, temperature=0.5)
        env.reset(seed=0)
        env.step(revise(0, "x"))
        (one, ids_one, limit_one), (two, ids_two, limit_two) = policy.calls
        assert env.episode.key == one
        assert two == one.at(3)  # dropped tokens count
        assert ids_one.tolist() == list(b"2+3=\n")
        assert ids_two.tolist() == list(b"2+3=\nx")
        assert (limit_one, limit_two) == (10, 9)
        assert env.sampling == Sampling(0.5)

    def test_illegal_revises_are_recorded_keeps(self) -> None:
        env = make("a", "b", "c", [EOS], max_reviews=3, chunk_tokens=1)
        env.reset(seed=0)
        info = env.step(revise(1, "x"))[4]
        assert (info["verdict"], info["cause"]) == ("unparsed", "bad_step")
        info = env.step(revise(0, [EOS]))[4]
        assert (info["verdict"], info["guard"]) == ("guarded", "special_token")
        obs, *_, info = env.step(Verdict.keep("by hand"))
        assert (info["verdict"], info["reason"]) == ("keep", "by hand")
        assert obs["accepted"] == "abc"
        assert [r.outcome for r in env.episode.reviews] == [
            Outcome.UNPARSED,
            Outcome.GUARDED,
            Outcome.KEEP,
        ]

    def test_corrections_as_ids(self) -> None:
        env = make("a", [EOS], correction="ids")
        env.reset(seed=0)
        action = {"verdict": 1, "step": 0, "correction": np.array([98, 99], dtype=np.int32)}
        assert action["correction"] in env.action_space["correction"]
        assert env.step(action)[4]["correction"] == (98, 99)

    def test_a_policy_that_fails(self) -> None:
        class Fails(ScriptedPolicy):
            async def generate(self, ids: Any, **kwargs: Any) -> Any:
                if self.calls:
                    raise PolicyError("out of memory")
                return await super().generate(ids, **kwargs)

        env = JudgeEnv(tasks=[TASK], policy=Fails([list(b"ab")]))
        env.reset(seed=0)
        obs, reward, terminated, truncated, info = env.step(KEEP)
        assert (obs["accepted"], reward, terminated, truncated) == ("ab", 0.0, False, True)
        assert (info["stop_reason"], info["valid"]) == ("error", False)
        assert info["detail"] == "policy: PolicyError: out of memory"
        env.policy.calls.append(None)  # type: ignore[attr-defined]
        with pytest.raises(PolicyError, match="out of memory"):
            env.reset(seed=0)

    def test_turns(self) -> None:
        async def tool(task: Task, need: NeedEnvironment) -> tuple[str, bool]:
            return "5", need.text.endswith("bye")

        env = make([*b"hi", EOS], [*b"bye", EOS], environment=tool, turns=True)
        env.reset(seed=0)
        obs, *_, info = env.step(KEEP)
        assert info["provenance"] == (0, 0, 0, 2)
        assert obs["steps"] == ("bye",)
        _, reward, terminated, _, info = env.step(KEEP)
        assert (reward, terminated, info["stop_reason"]) == (1.0, True, "environment")


class TestIllegal:
    @pytest.mark.parametrize(
        ("action", "match"),
        [
            ({"step": 0}, "dict of verdict"),
            ("keep", "dict of verdict"),
            ({"verdict": 2}, "0 .Keep. or 1"),
            ({"verdict": 1}, "step"),
            ({"verdict": 1, "step": -1}, "step"),
            ({"verdict": 1, "step": 0.5}, "step"),
        ],
    )
    def test_actions(self, action: Any, match: str) -> None:
        env = make("a", [EOS])
        env.reset(seed=0)
        with pytest.raises(UsageError, match=match):
            env.step(action)
        assert env.step(KEEP)[0]["accepted"] == "a"

    def test_before_reset_after_the_end_and_options(self) -> None:
        env = make([*b"5", EOS])
        with pytest.raises(UsageError, match="reset"):
            env.step(KEEP)
        env.reset(seed=0)
        env.step(KEEP)
        with pytest.raises(UsageError, match="finished"):
            env.step(KEEP)
        with pytest.raises(UsageError, match="unknown reset option 'control'"):
            env.reset(options={"control": True})
        with pytest.raises(UsageError, match="did you mean 't'"):
            env.reset(options={"task_id": "tt"})

    @pytest.mark.parametrize(
        ("kwargs", "error", "match"),
        [
            ({"max_reviews": 0}, UsageError, "nothing to do"),
            ({"correction": "words"}, UsageError, "'text' or 'ids'"),
            ({"policy": "sum"}, RegistryError, "sums"),
            ({"max_review": 3}, UsageError, "did you mean 'max_reviews'"),
        ],
    )
    def test_arguments(self, kwargs: dict[str, Any], error: type, match: str) -> None:
        with pytest.raises(error, match=match):
            JudgeEnv(**kwargs)


class TestSumPolicy:
    """The built-in policy makes the bare environment a task in which a judge matters."""

    KEY = RowKey(0, 0, "t", 0)

    def write(self, response: str, rate: float, key: RowKey = KEY, limit: int = 500) -> str:
        tokenizer = ByteTokenizer()
        prompt = "12 + 30 + 5 = ?\n"
        policy = SumPolicy(tokenizer, rate)
        chunk = sync(
            policy.generate(
                np.array(tokenizer.encode(prompt + response)),
                max_tokens=limit,
                stop=(),
                sampling=Sampling(),
                key=key,
            )
        )
        return tokenizer.decode(chunk.ids)

    @pytest.mark.parametrize(
        ("response", "rest"),
        [
            ("", "12 + 30 = 42\n\n42 + 5 = 47\n\nAnswer: 47<|eos|>"),
            ("12 + 3", "0 = 42\n\n42 + 5 = 47\n\nAnswer: 47<|eos|>"),
            ("12 + 30 = 42\n\n", "42 + 5 = 47\n\nAnswer: 47<|eos|>"),
            ("12 + 30 = 52\n\n", "52 + 5 = 57\n\nAnswer: 57<|eos|>"),  # as it stands, wrong or not
            ("so it is 42", "\n\n42 + 5 = 47\n\nAnswer: 47<|eos|>"),  # a judge's own words
            ("12 + 30 = 42\n\n42 + 5 = 47\n\n", "Answer: 47<|eos|>"),
            ("12 + 30 = 42\n\n42 + 5 = 47\n\nAns", "wer: 47<|eos|>"),
            ("12 + 30 = 42\n\n42 + 5 = 47\n\nit is 47", "\n\nAnswer: 47<|eos|>"),
            ("12 + 30 = 42\n\n42 + 5 = 47\n\nAnswer: 47", "<|eos|>"),
        ],
    )
    def test_it_goes_on_from_any_prefix(self, response: str, rest: str) -> None:
        assert self.write(response, 0.0) == rest

    def test_in_pieces_it_writes_the_same(self) -> None:
        text = ""
        while not text.endswith("<|eos|>"):
            text += self.write(text, 0.0, limit=5)
        assert text == self.write("", 0.0)

    def test_errors_are_keyed_and_take_new_draws(self) -> None:
        assert "= 42" not in self.write("", 1.0)
        assert self.write("", 0.5) == self.write("", 0.5)
        several = {self.write("", 0.5, self.KEY.at(draw)) for draw in range(0, 640, 64)}
        assert len(several) > 1

    def test_a_task_that_is_no_sum(self) -> None:
        env = JudgeEnv(tasks=[Task("t", "What?", "5", "last_integer")])
        with pytest.raises(PolicyError, match="no sum"):
            env.reset(seed=0)

    def test_a_right_judge_doubles_the_reward_of_one_that_keeps(self) -> None:
        def mean_reward(corrects: bool) -> float:
            env = JudgeEnv()
            total = 0.0
            for seed in range(100):
                obs, _ = env.reset(seed=seed)
                while True:
                    action = KEEP
                    for index, step in enumerate(obs["steps"] if corrects else ()):
                        left, _, right = step.strip().partition(" = ")
                        value = sum(int(n) for n in left.split(" + ")) if right else None
                        if right and value != int(right):
                            action = revise(index, f"{left} = {value}\n\n")
                            break
                    obs, reward, terminated, truncated, _ = env.step(action)
                    if terminated or truncated:
                        total += reward
                        break
            return total / 100

        # Without corrections 0.6 squared = 0.36 of the sums are right; with them all are.
        assert abs(mean_reward(False) - 0.36) < 0.15
        assert mean_reward(True) == 1.0
