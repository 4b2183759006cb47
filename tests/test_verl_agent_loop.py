"""The agent loop on the real veRL classes, against a stub of its server manager."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("trl")  # the shared tokenizer is in tiny_trl.py

from mintrl_env.adapters import verl_parts
from mintrl_env.adapters.verl_policy import ServerManagerPolicy
from mintrl_env.episode import EpisodeConfig
from mintrl_env.errors import ConfigError, TaskError, UsageError
from mintrl_env.prompts import HFTokenizer, PromptBuilder
from mintrl_env.rollout import Parts, RolloutConfig, Runner
from mintrl_env.store_rows import from_row
from mintrl_env.testing import ScriptedJudge
from mintrl_env.types import Kind, Outcome, Score, StopReason, Task, Verdict

_SPEC = importlib.util.spec_from_file_location(
    "verl_parts", Path(__file__).with_name("verl_parts.py")
)
assert _SPEC is not None and _SPEC.loader is not None
parts = importlib.util.module_from_spec(_SPEC)
sys.modules["verl_parts"] = parts
_SPEC.loader.exec_module(parts)
tiny = parts.tiny_trl()


pytestmark = pytest.mark.verl

HF = tiny.tokenizer()
EOS = HF.eos_token_id
TASK = Task("sum", "1+1=\n", answer="2", verifier="ends_with_answer")
EPISODE = {"chunk_tokens": 6, "max_reviews": 2, "max_correction": 3, "step_delimiters": ["\n"]}


def ids(text: str) -> list[int]:
    return list(HF.encode(text, add_special_tokens=False))


class _Ends:
    async def score(self, task: Task, response: str) -> Score:
        right = response.rstrip("\n").endswith(task.answer or "")
        return Score(float(right), "correct" if right else "wrong")


class _Down:
    async def score(self, task: Task, response: str) -> Score:
        raise ConnectionError("no sandbox")


JUDGE: dict[str, Any] = {"now": None}


class _Judge:
    """The judge that a test has put into JUDGE."""

    async def review(self, request: Any) -> Verdict:
        return await JUDGE["now"].review(request)


@pytest.fixture(scope="module", autouse=True)
def _names() -> Iterator[None]:
    with parts.registered(
        verifier={"ends_with_answer": _Ends, "down": _Down}, judge={"of_the_test": _Judge}
    ):
        yield


ASK = {"name": "of_the_test", "guards": {}}


def revise_first(request: Any) -> Verdict:
    return Verdict.revise(0, "a1") if request.review == 0 else Verdict.keep("fine")


@pytest.fixture(autouse=True)
def _judge() -> None:
    JUDGE["now"] = ScriptedJudge(revise_first)


def write(*chunks: str) -> Any:
    """A script: a row's chunks by what it has written so far, then an end."""
    texts = list(chunks)

    def script(request: str, prompt: list[int], params: dict[str, Any]) -> list[int]:
        turn = sum(1 for call in manager_calls(script) if call[0] == request) - 1
        text = texts[turn] if turn < len(texts) else ""
        written = ids(text.removesuffix("$")) + ([EOS] if text.endswith("$") or not text else [])
        return written[: params["max_tokens"]]

    return script


def manager_calls(script: Any) -> list[Any]:
    return script.manager.calls


def manager_of(script: Any, **options: Any) -> Any:
    manager = parts.StubManager(script, **options)
    script.manager = manager
    return manager


def run(
    script: Any = None,
    *,
    settings: dict[str, Any] | None = None,
    config: Any = None,
    version: int | None = 0,
    params: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[Any, Any, Any]:
    """(output, its trajectory, the manager) of one row."""
    manager = manager_of(script or write("1+1=3\n", "2$"), version=version)
    given = {
        "prompts": {"chat": False},
        "episode": EPISODE,
        "judge": ASK,
        "rollout": {"max_retries": 0},
    } | (settings or {})
    made = parts.loop(manager, HF, config, **given)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
    output = asyncio.run(made.run(params or sampling, **parts.fields(TASK, HF, **changes)))
    return output, from_row(output.extra_fields["mintrl"]), manager


# --- control, intervened, phases, validation


def test_a_control_is_never_reviewed() -> None:
    output, row, _ = run(session_id=1)
    assert row.kind is Kind.CONTROL and row.reviews == () and JUDGE["now"].requests == []
    assert output.response_ids == [*ids("1+1=3\n2"), EOS]
    assert output.response_mask == [1] * 8
    assert output.reward_score == 1.0 and row.rollout == 1 and row.update == 0


def test_an_intervened_row() -> None:
    output, row, manager = run(write("1+1=3\n", "=2$"), session_id=2)
    assert row.kind is Kind.INTERVENED
    # Two tokens of the judge replace the chunk; the policy goes on behind them.
    assert output.response_ids == [*ids("a1=2"), EOS] and output.response_mask == [1] * 5
    assert row.provenance.tolist() == [1, 1, 0, 0, 0]
    assert [r.outcome for r in row.reviews] == [Outcome.REVISE, Outcome.KEEP]
    assert row.reviews[0].dropped_ids.tolist() == ids("1+1=3\n")
    assert all(math.isnan(p) for p in row.logprobs[:2]) and row.logprobs[2:].tolist() == [-0.5] * 3
    prompt = ids(TASK.prompt)
    assert output.prompt_ids == prompt
    assert [call[1] for call in manager.calls] == [prompt, prompt + ids("a1")]
    assert len({call[0] for call in manager.calls}) == 1  # one id: one server, its prefix cache
    assert [call[2]["max_tokens"] for call in manager.calls] == [6, 6]
    assert output.response_logprobs is None


@pytest.mark.parametrize(("step", "reviewed"), [(1, True), (3, True), (4, False), (9, False)])
def test_the_judge_is_off_after_the_intervention_updates(step: int, reviewed: bool) -> None:
    _, row, _ = run(session_id=3, global_steps=step)  # intervention_updates=3: updates 0, 1, 2
    assert row.update == step - 1
    assert bool(JUDGE["now"].requests) is reviewed
    assert row.kind is (Kind.INTERVENED if reviewed else Kind.CONTROL)


def test_the_judge_stays_on() -> None:
    config = parts.config("actor_rollout_ref.actor.policy_loss.intervention_updates=-1")
    run(config=config, session_id=3, global_steps=10_000)
    assert JUDGE["now"].requests


def test_a_validation_is_never_reviewed_whatever_its_session() -> None:
    output, row, manager = run(
        session_id=3, mintrl_validate=True, global_steps=2,
        params={"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    )  # fmt: skip
    assert JUDGE["now"].requests == [] and row.kind is Kind.CONTROL and row.update == -3
    assert manager.calls[0][2]["temperature"] == 0.6 and manager.calls[0][2]["top_p"] == 0.95
    assert output.reward_score == 1.0


def test_a_batch_without_the_trainers_mark_is_refused() -> None:
    manager = manager_of(write("2$"))
    made = parts.loop(manager, HF, prompts={"chat": False}, episode=EPISODE, judge=ASK)
    given = parts.fields(TASK, HF)
    del given["mintrl_validate"]
    with pytest.raises(UsageError, match="mintrl_sync"):
        asyncio.run(made.run({}, **given))


@pytest.mark.parametrize("wrong", [{"top_p": 0.9}, {"top_k": 20}, {"temperature": 0.0}])
def test_training_samples_from_the_whole_distribution(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        run(params={"temperature": 1.0, **wrong})


# --- ends


def test_the_end_is_told_by_the_ids_not_by_the_reason() -> None:
    def script(request: str, prompt: list[int], params: dict[str, Any]) -> Any:
        # "completed" at a limit, then at an end whose id stands before two tokens too many.
        first = len(script.manager.calls) == 1
        return script.manager.answer(ids("1+1=3\n") if first else [*ids("2"), EOS, *ids("00")])

    output, row, _ = run(script, session_id=0)
    assert output.response_ids == [*ids("1+1=3\n2"), EOS]
    assert row.stop_reason is StopReason.EOS


def test_a_response_that_reaches_the_limit_is_valid() -> None:
    output, row, manager = run(
        lambda request, prompt, params: ids("1" * 40)[: params["max_tokens"]], session_id=0
    )
    assert len(output.response_ids) == 32 and row.stop_reason is StopReason.LENGTH and row.valid
    assert output.response_mask == [1] * 32 and output.reward_score == 0.0
    assert manager.calls[0][2]["stop_token_ids"] == [EOS]


def test_a_generation_config_adds_its_ends(tmp_path: Path) -> None:
    colon = ids(":")[0]
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{EOS}, {colon}]}}')
    config = parts.config(f"actor_rollout_ref.model.path={tmp_path}")
    output, _, manager = run(write("1:2", "3$"), config=config, session_id=0)
    assert output.response_ids == ids("1:")
    assert manager.calls[0][2]["stop_token_ids"] == sorted([EOS, colon])


# --- failures are data


@pytest.mark.parametrize(
    "answer",
    [{"token_ids": [], "stop_reason": "aborted", "log_probs": None}, {"token_ids": [10_000]}],
)
def test_a_request_without_a_token_makes_a_row_that_is_not_valid(answer: dict[str, Any]) -> None:
    def script(*_: Any) -> Any:
        return script.manager.answer([], **answer)

    output, row, manager = run(
        script, session_id=3, global_steps=2, settings={"rollout": {"max_retries": 1}}
    )
    assert len(manager.calls) == 2  # a fresh attempt, then the placeholder
    assert output.response_ids == [EOS] and output.response_mask == [0]
    assert not row.valid and "PolicyError" in row.cause and output.reward_score == 0.0
    assert output.extra_fields["min_global_steps"] == output.extra_fields["max_global_steps"] == 1
    assert output.extra_fields["reward_extra_info"]["undecided"] == 1.0


def test_a_judge_that_hangs_has_failed_and_the_row_goes_on() -> None:
    class Hangs:
        async def review(self, request: Any) -> Verdict:
            await asyncio.sleep(600)
            raise AssertionError

    JUDGE["now"] = Hangs()
    _, row, _ = run(session_id=2, settings={"judge": {**ASK, "timeout_s": 0.02}})
    assert [(r.outcome, r.cause) for r in row.reviews] == [(Outcome.FAILED, "timeout")] * 2
    assert row.valid and row.ids.tolist() == [*ids("1+1=3\n2"), EOS]


def test_the_deadline_of_a_trajectory_ends_it() -> None:
    async def never(*_: Any) -> Any:
        await asyncio.sleep(600)

    output, row, _ = run(
        lambda *a: never(*a), session_id=0, settings={"rollout": {"deadline_s": 0.05}}
    )
    assert not row.valid and row.stop_reason is StopReason.DEADLINE
    assert output.response_mask == [0] and output.reward_score == 0.0


def test_a_verifier_that_is_down_leaves_the_row_out() -> None:
    output, row, _ = run(session_id=0, settings={"verifier": {"name": "down"}})
    assert not row.valid and row.score.status == "unavailable"
    assert output.response_mask == [0] * 8 and output.reward_score == 0.0


def test_a_deferred_score_is_left_to_verl() -> None:
    output, row, _ = run(session_id=0, settings={"verifier": None})
    assert output.reward_score is None and row.valid and not row.score.decided
    assert "reward_extra_info" not in output.extra_fields
    assert output.response_mask == [1] * 8


def test_versions_are_the_servers() -> None:
    output, row, _ = run(version=7, session_id=0, global_steps=8)
    assert set(row.policy_versions.tolist()) == {7}
    assert output.extra_fields["min_global_steps"] == 7
    output, _, _ = run(version=None, session_id=0, global_steps=8)  # it says none: the update's
    assert output.extra_fields["max_global_steps"] == 7


# --- one set of rules


def test_the_runner_makes_the_same_trajectories() -> None:
    """The same script and judge through our own runner: every field is equal."""
    _, row, _ = run(write("1+1=3\n", "=2$"), session_id=2)
    builder = PromptBuilder(HFTokenizer(HF), chat=False, max_prompt=32)
    config = RolloutConfig(
        episode=EpisodeConfig(**(EPISODE | {"step_delimiters": ("\n",)}), max_response=32),
        n_control=2,
        n_intervened=2,
        max_retries=0,
    )
    JUDGE["now"] = ScriptedJudge(revise_first)
    policy = ServerManagerPolicy(manager_of(write("1+1=3\n", "=2$")), builder.tokenizer, {})
    runner = Runner(Parts(policy, JUDGE["now"], (), _Ends()), builder, config)
    expected = asyncio.run(runner.trajectory(TASK, builder.ids(TASK), update=0, rollout=2))
    assert row == expected


CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}|{% endif %}"
    "{% if add_generation_prompt %}<as>{% endif %}"
)


@pytest.mark.parametrize(
    "settings",
    [
        {"chat": False},
        {"chat": True},
        {"chat": True, "system_prompt": "a+", "template": "={problem}"},
        {"chat": True, "chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_prompt_ids_are_those_of_the_trl_path(settings: dict[str, Any], tmp_path: Path) -> None:
    hf = tiny.tokenizer(chat_template=CHAT)
    builder = lambda tokenizer: PromptBuilder(tokenizer, **settings, max_prompt=32)  # noqa: E731
    trainer = tiny.trainer(
        tmp_path,
        processing_class=hf,
        prompts=builder,
        task_of=lambda row: TASK,
        max_prompt_length=32,
    )
    try:
        expected = trainer.prompts.ids(TASK).tolist()
    finally:
        trainer.close()
    manager = manager_of(write("2$"))
    made = parts.loop(manager, hf, prompts=settings, episode=EPISODE, judge=ASK)
    row = parts.fields(TASK, hf, chat=settings["chat"])
    output = asyncio.run(made.run({"temperature": 1.0}, **row))
    assert output.prompt_ids == expected == manager.calls[0][1]


def test_a_row_that_somebody_else_wrote() -> None:
    hf = tiny.tokenizer(chat_template=CHAT)
    verifier = {"name": "ends_with_answer"}
    made = parts.loop(manager_of(write("2$")), hf, episode=EPISODE, judge=ASK, verifier=verifier)
    row = {
        "raw_prompt": [{"role": "user", "content": "1+1=\n"}],
        "data_source": "gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 17},
        "session_id": 0, "global_steps": 1, "mintrl_validate": False,
    }  # fmt: skip
    output = asyncio.run(made.run({"temperature": 1.0}, **row))
    assert output.prompt_ids == list(
        hf.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, return_dict=False)
    )
    assert output.reward_score == 1.0
    assert output.extra_fields["mintrl"]["task_id"] == "gsm8k 17"


def test_a_prompt_that_is_too_long_is_refused() -> None:
    with pytest.raises(TaskError, match="more than max_prompt = 32"):
        manager = manager_of(write("2$"))
        made = parts.loop(manager, HF, prompts={"chat": False}, judge=ASK)
        asyncio.run(made.run({}, **parts.fields(Task("long", "1+1=\n" * 9, answer="2"), HF)))


# --- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"judge": {"name": "self"}}, "serve the judge's model"),
        ({"judge": {**ASK, "url": "x"}}, "judge.url: no such key"),
        ({"judge": {"name": "oracle", "options": {"answer": "x"}}}, "judge.options.answer"),
        ({"judge": {**ASK, "timeout_s": 0}}, "timeout_s must be positive"),
        ({"episode": {"chunk": 6}}, "episode.chunk: no such key"),
        ({"episode": {"max_response": 6}}, "max_response: is set by veRL"),
        ({"episode": {"turns": True}}, "turns"),
        ({"rollout": {"n_control": 1}}, "n_control: is set by veRL"),
        ({"prompts": {"templates": "x"}}, "prompts.templates: no such key"),
    ],
)
def test_settings_that_are_wrong(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(settings=settings)


def test_a_phase_with_reviews_needs_a_judge() -> None:
    with pytest.raises(ConfigError, match="has no judge"):
        run(settings={"judge": None})
    _, row, _ = run(settings={"judge": None}, session_id=3, global_steps=4)  # GRPO needs none
    assert row.valid


def test_one_runner_a_process_and_settings() -> None:
    async def two() -> int:
        manager = manager_of(write("2$"))
        before = len(verl_parts._RUNNERS)
        for session in (0, 1, 2):
            made = parts.loop(manager, HF, prompts={"chat": False}, episode=EPISODE, judge=ASK)
            given = parts.fields(TASK, HF, session_id=session)
            await made.run({"temperature": 1.0}, **given)
        return len(verl_parts._RUNNERS) - before

    assert asyncio.run(two()) == 1


def test_hydra_makes_the_loop_from_the_yaml_entry() -> None:
    """As AgentLoopWorker does for each trajectory."""
    import hydra
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap

    entry = OmegaConf.create(
        """
        name: mintrl_agent
        _target_: mintrl_env.adapters.verl_agent_loop.MintrlAgentLoop
        prompts: {chat: false}
        episode: {chunk_tokens: 6, max_reviews: 2, max_correction: 3, step_delimiters: ["\\n"]}
        judge: {name: of_the_test, guards: {}}
        """
    )
    config = parts.config()
    made = hydra.utils.instantiate(
        config=entry,
        trainer_config=DictConfigWrap(config=config),
        server_manager=manager_of(write("1+1=3\n", "=2$")),
        tokenizer=HF,
        processor=None,
        hf_model_type="qwen3",
        dataset_cls=None,
        data_config=DictConfigWrap(config.data),
        tools=ToolListWrap([]),
    )
    output = asyncio.run(made.run({"temperature": 1.0}, **parts.fields(TASK, HF, session_id=2)))
    assert from_row(output.extra_fields["mintrl"]).provenance.tolist() == [1, 1, 0, 0, 0]
    assert output.extra_fields["mintrl"]["provenance"].tolist() == [1, 1, 0, 0, 0]
