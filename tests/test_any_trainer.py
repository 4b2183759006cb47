"""The example and docs/any_trainer.md's loop run as a user would run them."""

from __future__ import annotations

import importlib
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from mintrl_env import Score, Task, Verdict
from mintrl_env.testing import ScriptedJudge
from mintrl_env.types import Kind, Provenance, ReviewRequest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "any_trainer.md").read_text(encoding="utf-8")


def test_any_trainer_runs_and_its_loss_falls() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "any_trainer.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    losses = [float(x) for x in re.findall(r"^step \d+  loss (\S+)$", run.stdout, re.MULTILINE)]
    assert len(losses) == 8
    assert losses == sorted(losses, reverse=True)
    figures = dict(re.findall(r"^(mintrl/\S+) +(\S+)$", run.stdout, re.MULTILINE))
    assert float(figures["mintrl/rows"]) == 32
    assert float(figures["mintrl/trained_rows"]) == 31  # one row's verifier was down
    assert float(figures["mintrl/off_policy_fraction/intervened"]) > 0


# --- the page's loop


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)[number]


class Ones:
    """The share of `1`s in a response."""

    async def score(self, task: Task, response: str) -> Score:
        return Score(response.count("1") / max(len(response), 1), "share")


def revise_first(request: ReviewRequest) -> Verdict:
    return Verdict.revise(0, "11") if request.review == 0 else Verdict.keep()


def yours(updates: int) -> dict[str, Any]:
    """The names that the page says are the reader's."""
    vocab = {c: i for i, c in enumerate("0123456789+=\n ")}
    vocab |= {special: len(vocab) + i for i, special in enumerate(("[unk]", "[eos]"))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="[unk]"))
    backend.decoder = decoders.Fuse()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(vocab), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, initializer_range=0.2,
        )
    )  # fmt: skip
    return {
        "model": model,
        "tokenizer": PreTrainedTokenizerFast(
            tokenizer_object=backend, unk_token="[unk]", eos_token="[eos]"
        ),
        "tasks": [Task(f"t{i}", f"{i}+{i}=", answer="1") for i in range(3)],
        "judge": ScriptedJudge(revise_first),
        "verifier": Ones(),
        "optimiser": torch.optim.AdamW(model.parameters(), lr=3e-3),
        "updates": updates,
    }


def test_the_loop_is_about_forty_lines() -> None:
    code = block("python")
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 40 and max(map(len, lines)) <= 100


def test_the_loop_runs_and_its_loss_is_the_square_by_hand() -> None:
    space = yours(updates=1)
    before = {k: v.clone() for k, v in space["model"].state_dict().items()}
    exec(compile(block("python"), "docs/any_trainer.md", "exec"), space)
    rows, old = space["rows"], space["old"].double()
    assert len(rows) == 24 and sum(row.kind is Kind.CONTROL for row in rows) == 12
    judged = sum(row.count(Provenance.INTERVENTION) for row in rows)
    assert judged == 2 * sum(bool(row.reviews) for row in rows) > 0
    # One step from log pi_t: the log-ratio of POLICY tokens is 0, that of the judge's is not.
    squares, tokens = [], 0
    for index, row in enumerate(rows):
        controls = [r.reward for r in rows if r.task_id == row.task_id and r.kind is Kind.CONTROL]
        advantage = row.reward - sum(controls) / len(controls)
        mine = torch.tensor(row.provenance == Provenance.INTERVENTION)
        ratio = float((old[index, : len(row.ids)] + 0.2)[mine].sum())
        squares.append((1e-3 * ratio - advantage) ** 2)
        tokens += len(row.ids)
    micro = space["parts"][-1].tolist()  # `loss` is the last micro-batch's share
    assert space["loss"].item() == pytest.approx(
        sum(squares[i] for i in micro) / (2e-3 * tokens), rel=1e-4
    )
    after = space["model"].state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in space["model"].parameters())


def test_the_loop_learns() -> None:
    """More of what is rewarded, after some updates, in rows that nobody touched."""
    space = yours(updates=10)
    seen: list[float] = []
    judge = space["judge"]
    code = block("python").replace(
        "rows = [row for group in groups for row in group]",
        "rows = [row for group in groups for row in group]; seen.append(rows)",
    )
    exec(compile(code, "docs/any_trainer.md", "exec"), space | {"seen": seen, "judge": judge})

    def control(rows: Any) -> float:
        rewards = [row.reward for row in rows if row.kind is Kind.CONTROL]
        return sum(rewards) / len(rewards)

    first, last = ([control(rows) for rows in part] for part in (seen[:2], seen[-2:]))
    assert sum(last) / 2 > sum(first) / 2 + 0.3
    assert not any(math.isnan(value) for value in last)


# --- what the page says of the hooks


def test_its_files_and_functions_exist() -> None:
    for file in re.findall(r"`((?:adapters|trainers|examples|scripts|tests)/[^`*]+\.\w+)`", PAGE):
        assert (ROOT / file).exists(), file
    for module, name in re.findall(r"mintrl_env\.adapters\.(\w+)\.(\w+)", PAGE):
        assert callable(getattr(importlib.import_module(f"mintrl_env.adapters.{module}"), name))


def test_its_toml_is_read_by_the_hook() -> None:
    import inspect
    import tomllib

    from mintrl_env.adapters.prime_rl_hooks import mintrl_loss_fn

    config = tomllib.loads(block("toml"))
    loss = config["trainer"]["loss"]
    assert loss["type"] == "custom" and loss["import_path"].endswith(".mintrl_loss_fn")
    assert set(loss["kwargs"]) <= set(inspect.signature(mintrl_loss_fn).parameters)
    assert config["orchestrator"]["train"]["filter_zero_advantages"] is False


def test_its_yaml_has_the_names_that_the_hooks_read() -> None:
    source = (ROOT / "adapters" / "slime_hooks.py").read_text(encoding="utf-8")
    read = set(re.findall(r"args\.(mintrl_\w+)|\"(mintrl_\w+)\", ", source))
    names = {a or b for a, b in read}
    assert set(yaml.safe_load(block("yaml"))) <= names and len(names) == 6
