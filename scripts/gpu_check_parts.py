"""The parts of the GPU check. Each writes a row as soon as it knows one (see gpu_check.py)."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_check_common import (
    Report,
    Share,
    drawn,
    fresh_peak,
    learn,
    made_up_tasks,
    make_host,
    make_model,
    make_tokenizer,
    peak_mb,
    revise_first,
    rollout_config,
    timed,
    wait,
)
from torch import Tensor

from mintrl_env.adapters.session import RolloutSession
from mintrl_env.driving import RolloutConfig
from mintrl_env.episode import EpisodeConfig
from mintrl_env.prompts import HFTokenizer, PromptBuilder
from mintrl_env.trainers import objective
from mintrl_env.trainers.logprobs import sequence_logprobs
from mintrl_env.types import Kind, Provenance, Task


def run(name: str, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    PARTS[name](Report(args))


def logprobs_part(report: Report) -> None:
    """Forward and backward of one row: chunked log-probs beside full logits."""
    model, sizes, device = make_model(report), report.sizes, report.device
    report.row("model", parameters=sum(p.numel() for p in model.parameters()))

    def full(ids: Tensor, mask: Tensor, keep: int) -> Tensor:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[
            :, -keep - 1 : -1
        ]
        return torch.log_softmax(logits.float(), -1).gather(-1, ids[:, -keep:, None])[..., 0]

    def chunked(ids: Tensor, mask: Tensor, keep: int) -> Tensor:
        return sequence_logprobs(model, ids, mask, keep=keep)

    sides: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {"chunked": chunked, "full": full}
    for tokens in sizes.lengths:
        ids = torch.randint(2, sizes.shape["vocab_size"], (1, tokens + 16), device=device)
        mask = torch.ones_like(ids)
        who = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        who[:, 4 : tokens // 32 + 4] = objective.INTERVENTION
        seen: dict[str, Tensor] = {}
        for side, compute in sides.items():
            about = f"{side} log-probs, {tokens:,} tokens"
            times: dict[str, float] = {}
            try:
                for repeat in range(sizes.repeats + 1):
                    if repeat == 1:
                        fresh_peak(device)
                    with timed(times, "warm-up" if repeat == 0 else "steps", device):
                        logp = compute(ids, mask, tokens)
                        anchor = objective.anchor(logp, who, kind="const", kappa=-0.2)
                        advantage = torch.ones(1, device=device)
                        loss, _ = objective.mintrl_loss(logp, anchor, who, advantage, beta_2=1e-3)
                        loss.backward()
                    seen[side] = logp.detach().double()
                    del logp, loss, anchor
                    model.zero_grad(set_to_none=True)
            except torch.OutOfMemoryError as error:
                model.zero_grad(set_to_none=True)
                report.failed(about, str(error).splitlines()[0])
                continue
            step = times["steps"] / sizes.repeats
            figures = {"step s": step, "tokens/s": tokens / step, "peak MB": peak_mb(device)}
            report.row(about, **figures)
        if len(seen) == 2:
            gap = float((seen["chunked"] - seen["full"]).abs().max())
            report.row(f"largest difference, {tokens:,} tokens", nats=gap)


def update_part(report: Report) -> None:
    """Rollouts by the slot engine with a judge, and an optimiser step, without a trainer."""
    sizes, device, model = report.sizes, report.device, make_model(report)
    tokenizer = make_tokenizer(sizes.shape["vocab_size"])
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6)
    tasks, judge = made_up_tasks(sizes.tasks), revise_first(sizes.correction)
    host = make_host(report, model, tokenizer)
    with RolloutSession(host, rollout_config(sizes), judge=judge, verifier=Share()) as session:
        for update in range(sizes.updates):
            spent: dict[str, float] = {}
            model.eval()
            fresh_peak(device)
            with timed(spent, "rollouts s", device):
                groups = session.groups(tasks, update=update)
            rows = [row for group in groups for row in group]
            spent["sampled tokens/s"] = drawn(rows) / spent["rollouts s"]
            spent["rollouts peak MB"] = peak_mb(device)
            spent["KV MB"] = session.engine.kv_bytes / 2**20
            spent["judge's tokens"] = sum(row.count(Provenance.INTERVENTION) for row in rows)
            model.train()
            fresh_peak(device)
            spent |= learn(report, model, optimiser, rows, tokenizer.eos_id)
            spent["train peak MB"] = peak_mb(device)
            report.row(f"update {update}, {len(rows)} rows of {sizes.response} tokens", **spent)


def trl_part(report: Report) -> None:
    """MInTRLTrainer on the same model and tasks."""
    from datasets import Dataset
    from transformers import TrainerCallback

    from mintrl_env.adapters.trl_trainer import MInTRLConfig, MInTRLTrainer

    sizes, device, model = report.sizes, report.device, make_model(report)
    tokenizer = make_tokenizer(sizes.shape["vocab_size"])
    rows = sizes.tasks * sizes.rows

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            wait(device)
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            wait(device)
            report.row(
                f"step {state.global_step}, {rows} rows of {sizes.response} tokens",
                **{"step s": time.perf_counter() - self.start, "peak MB": peak_mb(device)},
            )

    def odd_words(completions: list[str], **_: Any) -> list[float]:
        return [
            sum(w[-1:] in "13579" for w in c.split()) / (len(c.split()) or 1) for c in completions
        ]

    with tempfile.TemporaryDirectory() as folder:
        args = MInTRLConfig(
            output_dir=folder,
            use_cpu=device.type == "cpu",
            bf16=device.type == "cuda",
            gradient_checkpointing=False,
            per_device_train_batch_size=sizes.micro_batch,
            gradient_accumulation_steps=rows // sizes.micro_batch,
            num_generations=sizes.rows,
            n_control=sizes.rows // 2,
            max_completion_length=sizes.response,
            max_prompt_length=32,
            chunk_tokens=sizes.chunk,
            max_reviews=2,
            max_correction=sizes.correction,
            engine_slots=rows,
            max_steps=sizes.updates,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = MInTRLTrainer(
            model,
            reward_funcs=odd_words,
            train_dataset=Dataset.from_dict(
                {"prompt": [str(task.prompt) for task in made_up_tasks(sizes.tasks)]}
            ),
            processing_class=tokenizer.hf,
            judge=revise_first(sizes.correction),
            args=args,
            callbacks=[Steps()],
        )
        fresh_peak(device)
        trainer.train()


def vllm_part(report: Report) -> None:
    """vLLM as the policy's engine, and new weights for it."""
    from mintrl_env.adapters.policy_vllm import vllm_policy

    sizes, model = report.sizes, make_model(report)
    tokenizer = make_tokenizer(sizes.shape["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        spent: dict[str, float] = {}
        host = make_host(report, model, tokenizer, policy_engine=vllm_policy(folder, memory=0.4))
        with timed(spent, "start s", report.device):
            session = RolloutSession(
                host, rollout_config(sizes), judge=revise_first(sizes.correction), verifier=Share()
            )
        with session:
            report.row("engine made", **spent)
            for update in range(sizes.updates):
                spent = {}
                with timed(spent, "weights and rollouts s", report.device):
                    groups = session.groups(made_up_tasks(sizes.tasks), update=update)
                rows = [row for group in groups for row in group]
                rate = drawn(rows) / spent["weights and rollouts s"]
                report.row(
                    f"update {update}, {len(rows)} rows", **spent, **{"sampled tokens/s": rate}
                )


def smollm2_part(report: Report) -> None:
    """SmolLM2 learns sums of three numbers; the judge works out each equation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mintrl_env.env_defaults import LastIntegerVerifier
    from mintrl_env.judges_arithmetic import ArithmeticJudge

    sizes, device = report.sizes, report.device
    model = AutoModelForCausalLM.from_pretrained(report.smollm2, dtype=torch.float32).to(device)
    hf = HFTokenizer(AutoTokenizer.from_pretrained(report.smollm2))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5)
    bf16 = torch.bfloat16 if device.type == "cuda" else None
    prompts = PromptBuilder(hf, chat=hf.hf.chat_template is not None)
    host = make_host(report, model, hf, prompts=prompts, prompt_tokens=96, autocast=bf16)
    episode = EpisodeConfig(
        chunk_tokens=sizes.problem_tokens // 3,
        max_reviews=3,
        max_correction=24,
        max_response=sizes.problem_tokens,
        step_delimiters=("\n",),
    )
    half = sizes.rows // 2
    config = RolloutConfig(episode, n_control=half, n_intervened=half)
    generator = torch.Generator().manual_seed(1)

    def problems(count: int, name: str) -> list[Task]:
        made = []
        for i in range(count):
            a, b, c = torch.randint(11, 90, (3,), generator=generator).tolist()
            text = f"What is {a} + {b} + {c}? Add two numbers a line, then write the answer last."
            made.append(Task(f"{name}{i}", text, answer=str(a + b + c)))
        return made

    held_out = problems(sizes.held_out, "held-out")
    judge, verifier = ArithmeticJudge(), LastIntegerVerifier()
    with RolloutSession(host, config, judge=judge, verifier=verifier) as session:

        def success() -> float:
            model.eval()
            one = [[0]] * len(held_out)
            groups = session.groups(held_out, update=-1, reviewed=False, rollouts=one)
            return sum(group[0].reward for group in groups) / len(groups)

        before, start, updates = success(), time.perf_counter(), 0
        report.row("before", success=before, problems=len(held_out))
        while time.perf_counter() - start < sizes.learning_s:
            model.eval()
            groups = session.groups(problems(sizes.tasks, f"u{updates}-"), update=updates)
            rows = [row for group in groups for row in group]
            model.train()
            spent = learn(report, model, optimiser, rows, hf.eos_id)
            updates += 1
            kinds = {kind: [r.reward for r in rows if r.kind is kind] for kind in Kind}
            report.row(
                f"update {updates}",
                control=sum(kinds[Kind.CONTROL]) / len(kinds[Kind.CONTROL]),
                intervened=sum(kinds[Kind.INTERVENED]) / len(kinds[Kind.INTERVENED]),
                **{"train s": spent["train s"]},
            )
        report.row("after", success=success(), updates=updates)


PARTS: dict[str, Callable[[Report], None]] = {
    "logprobs": logprobs_part,
    "update": update_part,
    "trl": trl_part,
    "vllm": vllm_part,
    "smollm2": smollm2_part,
}
