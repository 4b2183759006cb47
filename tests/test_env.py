"""The policy's view: Gymnasium's own checks, values of steps by hand, options, errors, tools."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env, data_equivalence

import mintrl_env  # noqa: F401 - registers the ids
from mintrl_env.env import PolicyEnv
from mintrl_env.env_defaults import LastIntegerVerifier
from mintrl_env.episode import EpisodeConfig, NeedEnvironment
from mintrl_env.errors import RegistryError, TaskError, UsageError, VerifierError
from mintrl_env.loops import sync
from mintrl_env.prompts import ByteTokenizer, PromptBuilder
from mintrl_env.testing import FunctionVerifier
from mintrl_env.types import (
    Chunk,
    FailedReview,
    Finish,
    NoReview,
    Outcome,
    Provenance,
    Score,
    StopReason,
    Task,
    Turn,
    Verdict,
)

EOS = 256
TASK = Task("t", "2+3=\n", answer="5", verifier="last_integer")
OTHER = Task("u", "1+1=\n", answer="2", verifier="last_integer")


def ids(text: str, *, eos: bool = False) -> np.ndarray:
    return np.array([*text.encode(), *([EOS] if eos else [])], dtype=np.int32)


def make(**kwargs: Any) -> PolicyEnv:
    kwargs.setdefault("tasks", [TASK])
    return PolicyEnv(**kwargs)


class TestGymnasium:
    @pytest.mark.parametrize(
        "kwargs",
        [
            {},
            {"render_mode": "ansi"},
            {"action": "text"},
            {"action": "text", "observation": "ids"},
            {"observation": "text"},
            {"control": True},
            {"chunk_tokens": 8, "max_reviews": 2, "max_response": 64},
        ],
    )
    def test_check_env_has_nothing_to_say(self, kwargs: dict[str, Any]) -> None:
        env = gymnasium.make("MinTRL/Policy-v0", **kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(env.unwrapped)

    def test_through_make_nothing_warns_in_a_whole_episode(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            env = gymnasium.make("MinTRL/Policy-v0", max_response=40, render_mode="ansi")
            env.reset(seed=1)
            for _ in range(4):
                result = env.step(ids("1234567890"))
            assert result[1:4] == (0.0, False, True)
            env.render()
            env.close()
            env.close()

    def test_the_spec_is_json_and_makes_the_same_environment(self) -> None:
        env = gymnasium.make(
            "MinTRL/Policy-v0", chunk_tokens=32, prompts={"template": "Q: {problem}"}
        )
        spec = gymnasium.envs.registration.EnvSpec.from_json(env.spec.to_json())  # type: ignore[union-attr]
        assert json.loads(env.spec.to_json())["entry_point"] == "mintrl_env.env:PolicyEnv"  # type: ignore[union-attr]
        again = gymnasium.make(spec)
        one, two = env.reset(seed=5), again.reset(seed=5)
        assert data_equivalence(one[0], two[0], exact=True)
        assert one[1] == two[1]
        assert two[1]["max_tokens"] == 32

    def test_it_can_be_made_by_module_and_id(self) -> None:
        assert gymnasium.make("mintrl_env:MinTRL/Policy-v0").reset(seed=0)[1]["prompt_tokens"] > 0

    def test_a_seed_repeats_tasks_and_another_seed_does_not(self) -> None:
        env = make(tasks="sums")

        def tasks(seed: int) -> list[str]:
            first = env.reset(seed=seed)[1]["task_id"]
            return [first, *(env.reset()[1]["task_id"] for _ in range(9))]

        assert tasks(3) == tasks(3)
        assert tasks(3) != tasks(4)
        assert len(set(tasks(3))) > 1

    def test_naming_a_task_does_not_shift_later_draws(self) -> None:
        env = make(tasks="sums")
        env.reset(seed=3)
        second = env.reset()[1]["task_id"]
        env.reset(seed=3, options={"task_id": "sums-train-0"})
        assert env.reset()[1]["task_id"] == second

    def test_global_generators_are_left_alone(self) -> None:
        np.random.seed(0)
        wanted = np.random.random()
        np.random.seed(0)
        make().reset(seed=1)
        assert np.random.random() == wanted

    def test_pickles_in_the_middle_of_an_episode(self) -> None:
        env = make()
        env.reset(seed=0)
        env.step(ids("a"))
        twin = pickle.loads(pickle.dumps(env))
        one, two = env.step(ids("5", eos=True)), twin.step(ids("5", eos=True))
        assert data_equivalence(one, two, exact=True)
        assert one[1] == 1.0

    def test_deep_copies_do_not_share_their_episodes(self) -> None:
        env = make()
        env.reset(seed=0)
        twin = copy.deepcopy(env)
        env.step(ids("a"))
        assert twin.observe().tolist() == list(b"2+3=\n")


class TestStep:
    def test_values_of_a_whole_episode(self) -> None:
        env = make(chunk_tokens=8, max_reviews=2, max_response=100)
        obs, info = env.reset(seed=0)
        assert obs.dtype == np.int32
        assert obs.tolist() == list(b"2+3=\n")
        assert info == {
            "task_id": "t",
            "kind": "intervened",
            "prompt_tokens": 5,
            "reviews_left": 2,
            "tokens_left": 100,
            "max_tokens": 8,
        }
        obs, reward, terminated, truncated, info = env.step(ids("I say "))
        assert obs.tolist() == list(b"2+3=\nI say ")
        assert (reward, terminated, truncated) == (0.0, False, False)
        assert info == {
            "task_id": "t",
            "kind": "intervened",
            "chunk": tuple(b"I say "),
            "verdict": "",
            "step": -1,
            "correction": (),
            "dropped": 0,
            "provenance": (0,) * 6,
            "reason": "",
            "cause": "",
            "guard": "",
            "reviews_left": 2,  # nobody reviewed: no budget spent
            "tokens_left": 94,
            "max_tokens": 8,
        }
        obs, reward, terminated, truncated, info = env.step(ids("5", eos=True))
        assert obs.tolist() == [*b"2+3=\nI say 5", EOS]
        assert (reward, terminated, truncated) == (1.0, True, False)
        assert info["score"] == {"status": "correct", "detail": "", "decided": True}
        assert (info["stop_reason"], info["valid"], info["max_tokens"]) == ("eos", True, 0)

    def test_a_reviewed_turn_is_cut_and_corrected(self) -> None:
        env = make(max_correction=4)
        env.reset(seed=0)
        turn = Turn(Chunk(ids("so\n\n2+3=6\n\nAnswer: 6", eos=True), finish=Finish.EOS))
        verdict = Verdict.revise(1, "2+3=5", reason="sum")  # cut to L = 4 tokens
        obs, reward, terminated, _, info = env.step(turn.with_verdict(verdict))
        assert bytes(obs.tolist()) == b"2+3=\nso\n\n2+3="
        assert (reward, terminated) == (0.0, False)
        assert (info["verdict"], info["step"], info["reason"]) == ("revise", 1, "sum")
        assert info["correction"] == tuple(b"2+3=")
        assert info["dropped"] == len("2+3=6\n\nAnswer: 6") + 1
        assert info["provenance"] == (0, 0, 0, 0, 1, 1, 1, 1)
        assert info["reviews_left"] == 3
        assert info["tokens_left"] == 16384 - 8

    def test_the_limit_truncates_with_the_verifiers_reward(self) -> None:
        env = make(max_response=6, chunk_tokens=5)
        env.reset(seed=0)
        assert env.step(ids("so 5"))[4]["max_tokens"] == 2
        _, reward, terminated, truncated, info = env.step(ids("!!"))
        assert (reward, terminated, truncated) == (1.0, False, True)
        assert (info["stop_reason"], info["valid"]) == ("length", True)

    def test_a_control_gets_all_of_t_and_no_review(self) -> None:
        env = make(chunk_tokens=4, max_response=50)
        _, info = env.reset(seed=0, options={"control": True})
        assert (info["kind"], info["reviews_left"], info["max_tokens"]) == ("control", 0, 50)
        turn = env.as_turn(ids("a much longer chunk than k"))
        assert env.review_request(turn) is None
        with pytest.raises(UsageError, match="no review"):
            env.step(turn.with_verdict(Verdict.keep()))
        assert env.step(turn)[4]["tokens_left"] == 50 - 26

    def test_undecided_is_no_wrong_answer(self) -> None:
        env = make(verifier=FunctionVerifier(lambda task, text: Score.undecided("bad_gold", "hm")))
        env.reset(seed=0)
        _, reward, terminated, _, info = env.step(ids("5", eos=True))
        assert (reward, terminated) == (0.0, True)
        assert info["score"] == {"status": "bad_gold", "detail": "hm", "decided": False}
        assert info["valid"] is False

    @pytest.mark.parametrize("error", [VerifierError("worker gone"), KeyError("bug")])
    def test_a_verifier_that_fails_is_undecided(self, error: Exception) -> None:
        def fail(task: Task, text: str) -> float:
            raise error

        env = make(verifier=FunctionVerifier(fail))
        env.reset(seed=0)
        _, reward, _, _, info = env.step(ids("5", eos=True))
        assert reward == 0.0
        assert (info["score"]["status"], info["score"]["decided"]) == ("unavailable", False)
        assert type(error).__name__ in info["score"]["detail"]

    def test_observations_never_share_memory(self) -> None:
        env = make()
        first, _ = env.reset(seed=0)
        second = env.step(ids("abc"))[0]
        third = env.step(ids("def"))[0]
        second[:] = 0
        assert first.tolist() == list(b"2+3=\n")
        assert third.tolist() == list(b"2+3=\nabcdef")
        assert env.observe().tolist() == list(b"2+3=\nabcdef")

    def test_the_buffer_grows_over_its_first_size(self) -> None:
        env = make(max_response=5000)
        env.reset(seed=0)
        text = b""
        for i in range(12):
            piece = bytes([97 + i]) * 300
            text += piece
            obs = env.step(np.frombuffer(piece, dtype=np.uint8))[0]
        assert bytes(obs.tolist()) == b"2+3=\n" + text

    def test_trajectory_is_the_record(self) -> None:
        env = make()
        env.reset(seed=0)
        turn = Turn(Chunk(ids("a\n\nb"), logprobs=[-1, -2, -3, -4]), Verdict.revise(1, "c"))  # type: ignore[arg-type]
        env.step(turn)
        with pytest.raises(UsageError, match="not finished"):
            env.trajectory()
        env.step(ids("5", eos=True))
        row = env.trajectory(update=3, rollout=7)
        assert (row.task_id, row.update, row.rollout, row.reward) == ("t", 3, 7, 1.0)
        assert bytes(row.ids[:-1].tolist()) == b"a\n\nc5"
        assert row.provenance.tolist() == [0, 0, 0, 1, 0, 0]
        np.testing.assert_array_equal(row.logprobs, [-1, -2, -3, np.nan, np.nan, np.nan])
        assert row.reviews[0].dropped_ids.tolist() == list(b"b")
        assert row.stop_reason is StopReason.EOS

    def test_every_author_has_a_mark_when_rendered(self) -> None:
        env = make(render_mode="ansi")
        env.reset(seed=0)
        env.step(Turn(Chunk(ids("a\n\nb")), Verdict.revise(1, "c")))
        assert env.render() == (
            "[t, intervened]\n2+3=\n\n---\na\n\n⟦judge: c⟧\n"
            "(review 0: revise, step 1, 1 tokens dropped)"
        )
        assert make().render() is None


class TestIllegal:
    """Each raises UsageError and leaves the episode as it was."""

    @pytest.mark.parametrize(
        ("action", "match"),
        [
            (np.zeros(9, dtype=np.int32), "1 to 8 tokens"),
            (np.zeros(0, dtype=np.int32), "non-empty"),
            (np.array([1, 257]), "257 is outside"),
            (np.array([1, -1]), "-1 is outside"),
            (np.array([EOS, 1]), "EOS stands inside"),
            (np.zeros((1, 2), dtype=np.int32), "1-D"),
            (np.zeros(2), "1-D"),
            (5, "1-D"),
            (None, "1-D"),
            ("text", "ids"),
        ],
    )
    def test_actions(self, action: object, match: str) -> None:
        env = make(chunk_tokens=8)
        env.reset(seed=0)
        env.step(ids("abc"))
        with pytest.raises(UsageError, match=match):
            env.step(action)
        assert env.step(ids("d"))[0].tolist() == list(b"2+3=\nabcd")

    def test_a_reviewed_turn_with_an_illegal_chunk(self) -> None:
        env = make(chunk_tokens=2)
        env.reset(seed=0)
        with pytest.raises(UsageError, match="1 to 2"):
            env.step(Turn(Chunk(ids("abc")), Verdict.keep()))
        assert env.observe().tolist() == list(b"2+3=\n")

    def test_illegal_verdicts_are_recorded_keeps(self) -> None:
        env = make()
        env.reset(seed=0)
        info = env.step(Turn(Chunk(ids("a")), Verdict.revise(1, "b")))[4]
        assert (info["verdict"], info["cause"], info["reviews_left"]) == ("unparsed", "bad_step", 3)
        info = env.step(Turn(Chunk(ids("b")), Verdict.revise(0, [EOS])))[4]
        assert (info["verdict"], info["guard"], info["reviews_left"]) == (
            "guarded",
            "special_token",
            2,
        )
        info = env.step(Turn(Chunk(ids("c")), FailedReview("timeout", "slow")))[4]
        assert (info["verdict"], info["cause"], info["reason"]) == ("failed", "timeout", "slow")
        info = env.step(Turn(Chunk(ids("d")), NoReview()))[4]
        assert (info["verdict"], info["reviews_left"]) == ("", 1)
        assert bytes(env.observe().tolist()) == b"2+3=\nabcd"
        assert [r.outcome for r in env.episode.reviews] == [
            Outcome.UNPARSED,
            Outcome.GUARDED,
            Outcome.FAILED,
        ]

    def test_step_before_reset_and_after_the_end(self) -> None:
        env = make()
        with pytest.raises(UsageError, match="reset"):
            env.step(ids("a"))
        env.reset(seed=0)
        env.step(ids("5", eos=True))
        with pytest.raises(UsageError, match="finished"):
            env.step(ids("a"))
        with pytest.raises(UsageError, match="finished"):
            env.review_request(env.as_turn(ids("a")))

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"taskid": "t"}, "did you mean 'task_id'"),
            ({"task_id": "tt"}, "did you mean 't'"),
            ({"control": 1}, "True or False"),
        ],
    )
    def test_reset_options(self, options: dict[str, Any], match: str) -> None:
        env = make()
        env.reset(seed=0)
        env.step(ids("a"))
        with pytest.raises(UsageError, match=match):
            env.reset(options=options)
        assert env.step(ids("b"))[0].tolist() == list(b"2+3=\nab")

    @pytest.mark.parametrize(
        ("kwargs", "error", "match"),
        [
            ({"chunk_token": 3}, UsageError, "did you mean 'chunk_tokens'"),
            ({"chunk_tokens": 0}, UsageError, "chunk_tokens"),
            ({"config": EpisodeConfig(), "spacing": 1}, UsageError, "not both"),
            ({"action": "words"}, UsageError, "'ids' or 'text'"),
            ({"observation": "words"}, UsageError, "'ids' or 'text'"),
            ({"tasks": []}, UsageError, "at least one"),
            ({"tasks": [TASK, TASK]}, UsageError, "one id"),
            ({"tasks": "summs"}, RegistryError, "sums"),
            ({"tasks": "nowhere.jsonl"}, TaskError, "does not exist"),
            ({"verifier": "last_integr"}, RegistryError, "last_integer"),
            ({"prompts": {"templat": "x"}}, UsageError, "templat"),
            ({"render_mode": "human"}, UsageError, "ansi"),
            ({"turns": True}, UsageError, "environment"),
        ],
    )
    def test_arguments(self, kwargs: dict[str, Any], error: type, match: str) -> None:
        with pytest.raises(error, match=match):
            PolicyEnv(**kwargs)

    def test_an_unknown_verifier_of_a_task_is_refused_at_reset(self) -> None:
        env = make(tasks=[Task("t", "2+3", answer="5", verifier="mathe")])
        with pytest.raises(RegistryError, match="math"):
            env.reset(seed=0)

    def test_two_tokenizers(self) -> None:
        prompts = PromptBuilder(ByteTokenizer())
        with pytest.raises(UsageError, match="two objects"):
            make(tokenizer=ByteTokenizer(), prompts=prompts)
        assert make(prompts=prompts).tokenizer is prompts.tokenizer


class TestText:
    def test_a_text_is_encoded_once_and_eos_text_ends_the_response(self) -> None:
        class Counting(ByteTokenizer):
            texts: list[str]

            def encode(self, text: str) -> list[int]:
                self.texts.append(text)
                return super().encode(text)

        tokenizer = Counting()
        tokenizer.texts = []
        env = make(action="text", tokenizer=tokenizer)
        obs, _ = env.reset(seed=0)
        assert obs == "2+3=\n"
        assert env.eos_text == "<|eos|>"
        obs, *_ = env.step("fünf: ")
        assert obs == "2+3=\nfünf: "
        obs, reward, terminated, _, info = env.step("5<|eos|>")
        assert (obs, reward, terminated) == ("2+3=\nfünf: 5<|eos|>", 1.0, True)
        assert info["chunk"] == (53, EOS)
        assert tokenizer.texts == ["2+3=\n", "fünf: ", "5"]

    def test_too_long_counts_tokens_not_characters(self) -> None:
        env = make(action="text", chunk_tokens=3)
        env.reset(seed=0)
        with pytest.raises(UsageError, match="1 to 3 tokens here, not 4"):
            env.step("üü")
        with pytest.raises(UsageError, match="not 0"):
            env.step("")

    def test_ids_are_taken_too(self) -> None:
        env = make(action="text")
        env.reset(seed=0)
        assert env.step(ids("a"))[0] == "2+3=\na"


class TestTurns:
    """EOS ends a turn and the environment answers."""

    def make(self, answer: Any, **kwargs: Any) -> PolicyEnv:
        return make(environment=answer, turns=True, verifier=LastIntegerVerifier(), **kwargs)

    def test_values_of_a_tool_call(self) -> None:
        seen: list[tuple[str, str, bool]] = []

        async def tool(task: Task, need: NeedEnvironment) -> tuple[str, bool]:
            seen.append((task.task_id, need.text, need.end_of_turn))
            return ("=5;", False) if len(seen) == 1 else ("bye", True)

        env = self.make(tool)
        env.reset(seed=0)
        obs, reward, terminated, truncated, info = env.step(ids("2+3", eos=True))
        assert obs.tolist() == [*b"2+3=\n2+3", EOS, *b"=5;"]
        assert info["provenance"] == (0, 0, 0, 0, 2, 2, 2)
        assert (reward, terminated, truncated) == (0.0, False, False)
        _, reward, terminated, truncated, info = env.step(ids("5", eos=True))
        assert (terminated, truncated, info["stop_reason"]) == (True, False, "environment")
        assert reward == 1.0
        assert seen == [("t", "2+3", True), ("t", "5", True)]

    def test_ids_as_an_answer(self) -> None:
        async def tool(task: Task, need: NeedEnvironment) -> tuple[list[int], bool]:
            return [1, 2], False

        env = self.make(tool)
        env.reset(seed=0)
        assert env.step(ids("", eos=True))[0].tolist() == [*b"2+3=\n", EOS, 1, 2]

    def test_a_stop_string_hands_over_inside_a_turn(self) -> None:
        async def tool(task: Task, need: NeedEnvironment) -> tuple[str, bool]:
            return f"[{need.end_of_turn}]", False

        env = self.make(tool, stop=("</call>",))
        env.reset(seed=0)
        chunk = Chunk(ids("x</call>"), finish=Finish.STOP)
        obs = env.step(chunk)[0]
        assert bytes(obs.tolist()) == b"2+3=\nx</call>[False]"

    def test_a_tool_that_raises_ends_the_episode_as_not_valid(self) -> None:
        async def tool(task: Task, need: NeedEnvironment) -> tuple[str, bool]:
            raise OSError("no disk")

        env = self.make(tool)
        env.reset(seed=0)
        _, reward, terminated, truncated, info = env.step(ids("x", eos=True))
        assert (reward, terminated, truncated) == (0.0, False, True)
        assert (info["stop_reason"], info["valid"]) == ("error", False)
        assert info["detail"] == "environment: OSError: no disk"
        assert env.trajectory().cause == info["detail"]

    def test_a_failure_that_was_asked_for_ends_with_its_episode(self) -> None:
        async def tool(task: Task, need: NeedEnvironment) -> tuple[str, bool]:
            return "ok", False

        env = self.make(tool)
        env.reset(seed=0)
        env.fail_environment("failed")
        assert bytes(env.step(ids("", eos=True))[0][-6:].tolist()) == b"failed"
        assert bytes(env.step(ids("", eos=True))[0][-2:].tolist()) == b"ok"
        env.fail_environment("failed")
        env.reset(seed=0)
        assert bytes(env.step(ids("", eos=True))[0][-2:].tolist()) == b"ok"

    def test_an_environment_without_turns_is_refused(self) -> None:
        async def tool(task: Task, need: NeedEnvironment) -> tuple[str, bool]:
            return "", True

        with pytest.raises(UsageError, match="turns=True"):
            make(environment=tool)

    def test_authors_by_mark(self) -> None:
        async def tool(task: Task, need: NeedEnvironment) -> tuple[str, bool]:
            return "out", False

        env = self.make(tool, render_mode="ansi")
        env.reset(seed=0)
        env.step(ids("in", eos=True))
        assert "in<|eos|>⟦environment: out⟧" in str(env.render())


class TestRequests:
    def test_review_request_is_a_preview_and_is_split_once(self) -> None:
        env = make()
        env.reset(seed=0)
        turn = env.as_turn(ids("a\n\nb"))
        request = env.review_request(turn)
        assert request is not None
        assert [step.text for step in request.steps] == ["a\n\n", "b"]
        assert (request.review, request.reviews_left, request.accepted_text) == (0, 3, "")
        assert env.review_request(turn) is request
        sibling = env.review_request(env.as_turn(ids("c")))
        assert sibling is not None
        assert sibling.chunk_text == "c"
        env.step(turn)
        other = env.review_request(turn)
        assert other is not None
        assert other.accepted_text == "a\n\nb"

    def test_as_turn(self) -> None:
        env = make()
        env.reset(seed=0)
        turn = env.as_turn(ids("5", eos=True))
        assert turn.chunk.finish is Finish.EOS
        assert env.as_turn(turn) is turn
        assert env.as_turn(turn.chunk).chunk is turn.chunk
        assert env.as_turn([53]).chunk.finish is Finish.LENGTH

    def test_episodes_have_keys_of_their_own_that_seeds_repeat(self) -> None:
        env = make()
        env.reset(seed=0)
        one = env.episode.key
        env.reset()
        two = env.episode.key
        env.reset(seed=0)
        assert env.episode.key == one != two


class TestDefaults:
    def test_files_columns_and_prompts(self, tmp_path: Any) -> None:
        path = tmp_path / "tasks.jsonl"
        path.write_text('{"q": "1+1", "a": "2"}\n')
        env = PolicyEnv(
            tasks=str(path),
            columns={"columns": {"prompt": "q", "answer": "a"}},
            prompts={"template": "Q: {problem}\n", "system_prompt": "Add."},
            verifier="last_integer",
        )
        obs, info = env.reset(seed=0)
        assert bytes(obs.tolist()) == b"Add.\n\nQ: 1+1\n"
        assert info["task_id"] == "0"
        assert env.step(ids("2", eos=True))[1] == 1.0

    def test_close_closes_what_was_made_by_name_once(self) -> None:
        closed: list[str] = []

        class Closing(LastIntegerVerifier):
            def close(self) -> None:
                closed.append("plain")

        class ClosingLater(LastIntegerVerifier):
            async def close(self) -> None:
                closed.append("async")

        env = make()
        env.setup.made.update(a=Closing(), b=ClosingLater())
        env.close()
        env.close()
        assert sorted(closed) == ["async", "plain"]

    @pytest.mark.parametrize(
        ("response", "gold", "reward", "status"),
        [
            ("the answer is 12", "12", 1.0, "correct"),
            ("12 or 13", "12", 0.0, "wrong"),
            ("-0", "0", 1.0, "correct"),
            ("007", "7", 1.0, "correct"),
            ("-7", "7", 0.0, "wrong"),
            ("none", "7", 0.0, "no_answer"),
            ("9" * 10_000, "7", 0.0, "wrong"),
            ("7", "seven", None, "bad_gold"),
            ("7", None, None, "bad_gold"),
        ],
    )
    def test_last_integer(
        self, response: str, gold: str | None, reward: float | None, status: str
    ) -> None:
        score = sync(LastIntegerVerifier().score(Task("t", "p", answer=gold), response))
        assert score.status == status
        assert score.decided is (reward is not None)
        if reward is not None:
            assert score.reward == reward

    @pytest.mark.slow
    def test_a_transformers_tokenizer_by_its_path(self, tmp_path: Any) -> None:
        pytest.importorskip("transformers")
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = Tokenizer(models.WordLevel({"<eos>": 0, "?": 1, "2": 2, "3": 3}, unk_token="?"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="?")
        fast.save_pretrained(tmp_path)
        env = make(tokenizer=str(tmp_path), tasks=[Task("t", "2 3", "3", "last_integer")])
        assert env.reset(seed=0)[0].tolist() == [2, 3]
        assert env.step([3, 0])[1:3] == (1.0, True)
        with pytest.raises(UsageError, match="neither 'bytes' nor"):
            make(tokenizer=str(tmp_path / "none"))

    def test_provenance_values_are_those_of_the_enum(self) -> None:
        # info["provenance"] holds plain ints, so that JSON and vector infos take it.
        assert [int(p) for p in Provenance] == [0, 1, 2]
