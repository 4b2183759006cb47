"""One update and one validation through the real Ray, run by test_verl_ray.py in a process of its own.

    python tests/verl_ray_program.py FOLDER

Real: Ray, TransferQueue, AgentLoopManagerTQ and its workers, LLMServerClient with its load balancer,
RewardLoopManager with our `compute_score`, the replay buffer, and the trainer's own steps. Stubs: the
model server (an actor that writes by script) and the worker group (log-probs by formula, and no
optimiser). What came of it is printed as one line of JSON.
"""

from __future__ import annotations

import json
import os
import string
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
SCRIPT = ("1+1=3\n", "\\boxed{2}")


class FirstStep:
    """A judge: the first review cuts the first step."""

    async def review(self, request: Any) -> Any:
        from mintrl_env.types import Verdict

        return Verdict.revise(0, "so ") if request.review == 0 else Verdict.keep()


class Server:
    """A model server's actor: SCRIPT's first text, then its second and an end."""

    def __init__(self, eos: int) -> None:
        import verl_ray_program  # noqa: F401 (for its characters: this process has its own tiny_trl)
        from tiny_trl import tokenizer

        self.hf, self.eos, self.calls = tokenizer(), eos, []

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        self.calls.append((len(prompt_ids), dict(sampling_params)))
        text = self.hf.decode(prompt_ids)
        begun = not text.endswith("=?\n")
        ids = self.hf.encode(SCRIPT[begun], add_special_tokens=False) + [self.eos] * begun
        ids = ids[: sampling_params["max_tokens"]]
        return TokenOutput(
            token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason="completed",
            extra_fields={"global_steps": 0},
        )  # fmt: skip

    def seen(self) -> list[Any]:
        return self.calls


def use_all_characters() -> None:
    import tiny_trl

    tiny_trl.CHARACTERS = "".join(c for c in string.printable if c.isprintable() or c == "\n")


use_all_characters()


def main(folder: Path) -> None:
    import ray
    import tiny_trl
    import torch
    import transfer_queue as tq
    import verl_parts as parts
    from tensordict import TensorDict
    from verl.experimental.reward_loop import RewardLoopManager
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ
    from verl.utils import tensordict_utils as tu
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    from mintrl_env.adapters.verl_rows import verl_row
    from mintrl_env.adapters.verl_trainer import MarkedManager, MintrlTrainerSync
    from mintrl_env.prompts import HFTokenizer, PromptBuilder
    from mintrl_env.types import Task

    hf = tiny_trl.tokenizer()
    hf.save_pretrained(folder / "model")
    shape = tiny_trl.model(vocab_size=len(hf)).config
    shape.architectures = ["Qwen3ForCausalLM"]
    shape.save_pretrained(folder / "model")
    agent = folder / "agent.yaml"
    agent.write_text(
        """
- name: mintrl_agent
  _target_: mintrl_env.adapters.verl_agent_loop.MintrlAgentLoop
  prompts: {chat: false}
  episode: {chunk_tokens: 12, max_reviews: 2, max_correction: 3, step_delimiters: ["\\n"]}
  judge: {name: "verl_ray_program:FirstStep", guards: {}}
  verifier: null
"""
    )
    config = parts.config(
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agent}",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "transfer_queue.enable=True",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "reward.num_workers=1",
        "reward.custom_reward_function.path=pkg://mintrl_env.adapters.verl_score",
        "reward.custom_reward_function.name=compute_score",
        f"+actor_rollout_ref.actor.policy_loss.store={folder / 'store'}",
    )
    ray.init(
        num_cpus=16,
        include_dashboard=False,
        runtime_env={
            "env_vars": {
                "PYTHONPATH": os.pathsep.join(sys.path[:2]),
                "VERL_USE_EXTERNAL_MODULES": "mintrl_env.adapters.verl_plugin",
                "TRANSFER_QUEUE_ENABLE": "1",
                "OMP_NUM_THREADS": "1",
            }
        },
    )
    tq.init(config.transfer_queue)
    server = ray.remote(Server).remote(hf.eos_token_id)
    balancer = ray.remote(GlobalRequestLoadBalancer).remote({"stub": server})
    rewards = RewardLoopManager(config)
    manager = AgentLoopManagerTQ.create(
        config=config,
        llm_client=LLMServerClient(config, balancer),
        reward_loop_worker_handles=rewards.reward_loop_worker_handles,
    )

    class Workers:
        _dispatch_info = {"actor": [0, 1]}  # noqa: RUF012 (veRL's own form)

        def compute_log_prob(self, batch: Any) -> Any:
            data = tq.kv_batch_get(batch.keys, batch.partition_id, ["prompts", "responses"])
            lengths = [
                len(p) + len(r)
                for p, r in zip(data["prompts"].unbind(), data["responses"].unbind(), strict=True)
            ]
            whole = parts.ragged([torch.full((n,), -1.0) for n in lengths])
            fields = {"log_probs": whole, "entropy": whole}
            tq.kv_batch_put(
                batch.keys, batch.partition_id, TensorDict(fields, batch_size=len(lengths))
            )
            return batch

        def update_actor(self, batch: Any) -> Any:
            return {"metrics": {"loss": [0.0], "grad_norm": [0.5], "mfu": [0.0]}}

    trainer = MintrlTrainerSync(config)
    trainer.tokenizer, trainer.actor_rollout_wg = hf, Workers()
    trainer.agent_loop_manager = MarkedManager(manager)
    trainer.reward_loop_manager = rewards
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 2)

    builder = PromptBuilder(HFTokenizer(hf), chat=False)
    tasks = [Task("right", "1+1=?\n", answer="2"), Task("wrong", "2+1=?\n", answer="3")]

    def rows(prefix: str) -> dict[str, Any]:
        made = [verl_row(task, builder, index=i, split="train") for i, task in enumerate(tasks)]
        columns: dict[str, Any] = {name: [row[name] for row in made] for name in made[0]}
        columns["raw_prompt"] = columns.pop("prompt")
        columns["index"] = [0, 1]
        columns["uid"] = [f"{prefix}{i}" for i in range(2)]
        return columns

    # 1. a training step
    trainer.global_steps = 1
    batch = tu.get_tensordict(rows("uid"))
    tu.assign_non_tensor_data(batch, "global_steps", 1)
    trainer._submit_batch_to_rollout(batch)
    sampled, _ = trainer.replay_buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    metrics: dict[str, Any] = {}
    sampled.extra_info["temperature"] = 1.0
    batch = trainer._balance_batch(sampled, metrics)
    batch = trainer._compute_old_log_prob(batch, metrics)
    batch = trainer._compute_advantage(batch, metrics)
    batch = trainer._update_actor(batch, metrics)
    trainer._compute_metrics(batch, metrics, {"gen": 1.0, "step": 1.0}, global_steps=1, epoch=0)
    names = ["advantages", "old_log_probs", "response_mask", "rollout_is_weights", "responses"]
    data = tq.kv_batch_get(batch.keys, batch.partition_id, names)
    fields = {
        key: {name: data[name].unbind()[i].tolist() for name in names}
        for i, key in enumerate(batch.keys)
    }
    training_calls = len(ray.get(server.seen.remote()))
    tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)

    # 2. a validation
    trainer.val_dataloader = [{k: v for k, v in rows("val").items() if k != "uid"}]
    trainer._maybe_log_val_generations = lambda **_: None
    seen: list[Any] = []
    sample = trainer.replay_buffer.sample

    def spy(**kwargs: Any) -> Any:
        taken = sample(**kwargs)
        values = tq.kv_batch_get(taken[0].keys, "val", ["extra_fields"])["extra_fields"]
        seen.extend(value["mintrl"] for value in values)
        return taken

    trainer.replay_buffer.sample = spy
    validated = trainer._validate()

    result = {
        "fields": fields,
        "texts": {key: hf.decode(value["responses"]) for key, value in fields.items()},
        "metrics": {k: float(v) for k, v in metrics.items()},
        "training_calls": training_calls,
        "validation": {k: float(v) for k, v in validated.items()},
        "validation_rows": [[r["kind"], r["update"], len(r["reviews"])] for r in seen],
    }
    print("RESULT " + json.dumps(result), flush=True)
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
