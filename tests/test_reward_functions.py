"""The verifiers as reward functions: TRL's form on a real trainer, and veRL's `compute_score`."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mintrl_env.adapters import verl_score
from mintrl_env.adapters.reward_functions import (
    VerifierReward,
    code_reward,
    completion_text,
    math_reward,
)
from mintrl_env.adapters.verl_score import compute_score
from mintrl_env.errors import UsageError, VerifierError
from mintrl_env.protocols import Verifier
from mintrl_env.types import Score, Task
from mintrl_env.verifiers.math_answer import MathVerifier

TESTS = {"type": "call", "fn_name": "f", "inputs": [[1]], "outputs": [2]}


class Seen:
    """Keeps what it is asked; the reward is the length of the response."""

    def __init__(self) -> None:
        self.asked: list[tuple[Task, str]] = []

    async def score(self, task: Task, response: str) -> Score:
        self.asked.append((task, response))
        return Score(float(len(response)), "rewarded")


def messages(text: str | None) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


# --- TRL -----------------------------------------------------------------------------------------


def test_math_rewards_of_plain_texts() -> None:
    reward = math_reward()
    texts = [r"\boxed{0.5}", r"\boxed{5\sqrt{2}}", "#### 4", "no", r"\boxed{1}"]
    golds = ["1/2", r"\sqrt{50}", "3", "3", r"\frac{1}{"]
    assert reward(prompts=[""] * 5, completions=texts, answer=golds, level=[1] * 5) == [
        *(1.0, 1.0, 0.0, 0.0, None)
    ]
    assert reward.__name__ == "math_reward"
    statuses = [score.status for score in reward.scores(texts, answer=golds)]
    assert statuses == ["correct", "correct", "wrong", "no_answer", "bad_gold"]


def test_math_rewards_of_conversations_and_other_columns() -> None:
    reward = math_reward(verifier=MathVerifier(workers=1))
    completions = [messages("#### 3"), messages("#### 4"), messages(None)]
    solutions = [r"First, then \boxed{3}.", r"Hence \boxed{3}.", "3"]
    assert reward([], completions, solution=solutions) == [1.0, 0.0, 0.0]
    mixed = {"answer": [None, "4", None], "gold": ["3", "0", None], "solution": ["0", "0", "7"]}
    assert reward([], [*completions[:2], messages("#### 7")], **mixed) == [1.0, 1.0, 1.0]
    own = math_reward(answer="target")
    assert own([], completions, target=[3, 4, 3.0]) == [1.0, 1.0, 0.0]
    with pytest.raises(UsageError, match=r"no column 'target' .* it has: answer, level"):
        own([], completions, answer=["3"] * 3, level=[1] * 3, trainer_state=object())


def test_what_a_completion_says() -> None:
    assert completion_text("x") == "x"
    assert completion_text([]) == ""
    turns = [*messages("first"), {"role": "tool", "content": "out"}, *messages("last")]
    assert completion_text([*turns, {"role": "tool", "content": "after"}]) == "last"
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert completion_text([{"role": "assistant", "content": parts}]) == "ab"
    with pytest.raises(UsageError, match="a text or a list of messages"):
        completion_text(3)


def test_code_columns_reach_the_verifier() -> None:
    """A data set fills the keys that a row lacks with None, and may keep tests as a text."""
    seen = Seen()
    reward = code_reward(verifier=seen)
    filled = {**TESTS, "asserts": None}
    columns = {"tests": [filled, '{"type": "x"}', None], "limits": [{"wall_s": 1.0}, None, None]}
    columns["entry_point"] = [None, "g", None]
    assert reward([], ["a", "bb", "ccc"], id=[7, 8, 9], **columns) == [1.0, 2.0, 3.0]
    tasks = {task.task_id: task for task, _ in seen.asked}
    assert [tasks[name].tests for name in "789"] == [TESTS, '{"type": "x"}', None]
    assert tasks["7"].metadata == {"limits": {"wall_s": 1.0}} and tasks["8"].metadata == {
        "entry_point": "g"
    }
    with pytest.raises(UsageError, match="no column 'tests'"):
        reward([], ["a"], answer=["1"])


def test_code_rewards() -> None:
    reward = code_reward()
    right, wrong = (f"```python\ndef f(x):\n    return x + {n}\n```" for n in (1, 2))
    found = reward([], [right, messages(wrong), "no code"], tests=[TESTS] * 3)
    if reward.scores([right], tests=[TESTS])[0].status == "unavailable":
        pytest.skip("no sandbox on this machine")
    assert found == [1.0, 0.0, 0.0]
    assert reward([], [right], tests=[{"type": "nonsense"}]) == [None]


def test_any_verifier_and_pickling() -> None:
    reward = VerifierReward(Seen(), name="length")
    assert reward([], ["a", "bb"]) == [1.0, 2.0]
    again = pickle.loads(pickle.dumps(math_reward()))
    assert again([], ["#### 3"], answer=["3"]) == [1.0]
    assert again.__name__ == "math_reward"


def test_a_real_trainer(tmp_path: Path) -> None:
    """GRPOTrainer calls it, undecided rows are None there, and its logs say how many."""
    pytest.importorskip("trl")
    import torch
    from trl import GRPOConfig, GRPOTrainer

    spec = importlib.util.spec_from_file_location(
        "tiny_trl", Path(__file__).with_name("tiny_trl.py")
    )
    assert spec is not None and spec.loader is not None
    tiny = importlib.util.module_from_spec(spec)
    sys.modules["tiny_trl"] = tiny
    spec.loader.exec_module(tiny)
    torch.set_num_threads(1)
    answers = ["1", "2", r"\frac{1}{", "4"]
    settings = GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=8,
        max_steps=1,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        beta=0.0,
    )
    trainer = GRPOTrainer(
        model=tiny.model(),
        reward_funcs=[math_reward(), tiny.ones],
        train_dataset=tiny.dataset(4, answer=answers),
        processing_class=tiny.tokenizer(),
        args=settings,
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logged) == 1
    assert logged[0]["math_reward/undecided"] == 0.25  # one prompt of four has no gold
    assert logged[0]["rewards/math_reward/mean"] == 0.0  # eight random characters hold no box


# --- veRL ----------------------------------------------------------------------------------------


def test_scores_for_verl() -> None:
    right = compute_score("gsm8k", "#### 12", "12", {"index": 3})
    assert right == {"score": 1.0, "acc": 1.0, "undecided": 0.0, "status": "correct"}
    wrong = compute_score("gsm8k", "#### 13", "12")
    assert (wrong["score"], wrong["status"]) == (0.0, "wrong")
    assert compute_score("x", "#### 12", np.array(["12"], dtype=object))["score"] == 1.0
    assert compute_score("x", "#### 12", 12, num_examine=0, tokenizer=None)["score"] == 1.0
    assert compute_score("x", r"\boxed{\{1,2\}}", "{1,2}")["score"] == 1.0
    bad = compute_score("x", "#### 12", r"\frac{1}{")
    assert bad == {"score": 0.0, "acc": 0.0, "undecided": 1.0, "status": "bad_gold"}
    assert compute_score("x", "#### 12", r"\frac{1}{", undecided=-1.0)["score"] == -1.0
    with pytest.raises(UsageError, match="not 2 of them"):
        compute_score("x", "#### 12", ["12", "13"])


def test_verl_picks_the_verifier_by_the_ground_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, asked = Seen(), []

    def verifier(kind: str) -> Verifier:
        asked.append(kind)
        return seen

    monkeypatch.setattr(verl_score, "_verifier", verifier)
    text = '{"inputs": ["1"], "outputs": ["1"]}'
    compute_score("apps", "code", text, {"limits": {"wall_s": 1.0}, "index": 5})
    compute_score("apps", "code", {**TESTS, "asserts": None})
    compute_score("set", "answer", "{1, 2}")
    compute_score("own", "answer", "3", verifier="mine")
    assert asked == ["code", "code", "math", "mine"]
    tasks = [task for task, _ in seen.asked]
    assert tasks[0].tests == {"inputs": ["1"], "outputs": ["1"]}
    assert tasks[0].task_id == "apps 5" and tasks[0].metadata == {"limits": {"wall_s": 1.0}}
    assert tasks[1].tests == TESTS and tasks[1].answer is None
    assert (tasks[2].tests, tasks[2].answer) == (None, "{1, 2}")


def test_an_unavailable_verifier_is_asked_again_then_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Down:
        calls = 0

        async def score(self, task: Task, response: str) -> Score:
            self.calls += 1
            if self.calls == 2:
                return Score(1.0, "correct")
            raise OSError("connection refused")

    down = Down()
    monkeypatch.setattr(verl_score, "RETRY_S", (0.0, 0.0))
    monkeypatch.setattr(verl_score, "_verifier", lambda kind: down)
    assert compute_score("x", "r", "3")["score"] == 1.0
    with pytest.raises(VerifierError, match=r"'math' is down: OSError: connection refused"):
        compute_score("x", "r", "3")
    assert down.calls == 5


def test_a_daemonic_process() -> None:
    """As a data loader's or an actor's, which may have no multiprocessing children."""
    code = (
        "import multiprocessing as m\n"
        "from mintrl_env.adapters.verl_score import compute_score\n"
        "def child(q): q.put(compute_score('x', r'\\boxed{7\\sqrt{2}}', r'\\sqrt{98}')['score'])\n"
        "if __name__ == '__main__':\n"
        "    q = m.get_context('fork').SimpleQueue()\n"
        "    p = m.get_context('fork').Process(target=child, args=(q,), daemon=True)\n"
        "    p.start(); print(q.get()); p.join()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["1.0"]


def test_importing_them_loads_no_trainer() -> None:
    code = (
        "import sys\n"
        "import mintrl_env.adapters.reward_functions, mintrl_env.adapters.verl_score\n"
        "print(sorted({'torch', 'trl', 'verl', 'ray', 'transformers', 'sympy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
