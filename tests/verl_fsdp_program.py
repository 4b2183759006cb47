"""Optimiser steps of veRL's FSDP2 engine on gloo, run by test_verl_fsdp.py under torchrun.

    torchrun --nproc_per_node 2 tests/verl_fsdp_program.py FOLDER

Real: TrainingWorker, its mini-batch loader, FSDPEngineWithLMHead (fsdp2), `ppo_loss` with the loss
`mintrl`. veRL has no CPU platform, so verl_cpu.py registers a small one; the engine, registered for
"cuda", is asked for by that name. The learning rate is 0, so that each step's loss and gradient norm
are those of the first weights. Rank 0 prints one line of JSON: what the engine said of each step, and
the same from a plain transformers model.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "HF_HUB_OFFLINE": "1"}

import torch  # noqa: E402
import verl_cpu  # noqa: E402, F401 (registers the platform)


def main(folder: Path) -> None:
    import tiny_trl
    import verl_parts as parts
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import response_from_nested

    from mintrl_env.adapters.verl_batch import minibatch_index, regression_tensors
    from mintrl_env.adapters.verl_trainer import actor_fields

    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    config = parts.config(
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.actor.optim.lr=0.0",
        "actor_rollout_ref.actor.optim.clip_grad=1e9",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
        *(
            f"+actor_rollout_ref.actor.fsdp_config.mixed_precision.{name}_dtype=fp32"
            for name in ("param", "reduce", "buffer")
        ),
        "+actor_rollout_ref.actor.policy_loss.beta_2=0.05",
    )
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    engine = actor.engine
    engine.use_dynamic_bsz = False
    for name in ("micro_batch_size_per_gpu", "infer_micro_batch_size_per_gpu"):
        setattr(engine, name, 2)
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=omega_conf_to_dataclass(config.actor_rollout_ref.model),
            engine_config=engine,
            optimizer_config=actor.optim,
            checkpoint_config=actor.checkpoint,
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, config=actor))

    from verl_fsdp_rows import NAMES, ROWS, hand, old_logps

    per_rank, minibatch = len(ROWS) // ranks, 8
    here = slice(rank * per_rank, (rank + 1) * per_rank)
    hf = tiny_trl.tokenizer()
    sequences = [
        (row.prompt_ids.tolist(), row.ids.tolist())
        if row is not None
        else ([hf.eos_token_id] * 127, [hf.eos_token_id])
        for row in ROWS
    ]

    def batch() -> TensorDict:
        whole = [torch.tensor(p + r) for p, r in sequences[here]]
        data = {
            "input_ids": parts.ragged(whole),
            "position_ids": parts.ragged([torch.arange(len(ids)) for ids in whole]),
            "prompts": parts.ragged([torch.tensor(p) for p, _ in sequences[here]]),
            "responses": parts.ragged([torch.tensor(r) for _, r in sequences[here]]),
        }
        ones = parts.ragged([torch.ones(len(r)).long() for _, r in sequences[here]])
        made = TensorDict({**data, "response_mask": ones, "loss_mask": ones}, batch_size=per_rank)
        tu.assign_non_tensor(made, temperature=1.0)
        return made

    # 1. log-probs by the engine, beside transformers'
    def own_logps() -> list[list[float]]:
        data = batch()
        tu.assign_non_tensor(data, compute_loss=False, calculate_entropy=False)
        output = worker.infer_batch(data)
        nested = response_from_nested(output["log_probs"], data["response_mask"])
        return [part.tolist() for part in nested.unbind()]

    own = own_logps()
    everyone: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(everyone, own)
    logps = [part for each in everyone for part in each]

    # 2. an update of two optimiser steps
    old = old_logps([torch.tensor(part) for part in logps])
    tensors = regression_tensors(
        ROWS, NAMES, torch.nn.utils.rnn.pad_sequence(old, batch_first=True),
        minibatch_index(len(ROWS), dp_size=ranks, minibatch=minibatch),
        actor.policy_loss, minibatch=minibatch,
    )  # fmt: skip
    ones = parts.ragged([torch.ones(len(r)).long() for _, r in sequences])
    fields = actor_fields(tensors, ones)
    data = batch()
    for name, value in fields.items():
        data[name] = parts.ragged(value.unbind()[here])
    tu.assign_non_tensor(
        data, global_batch_size=minibatch, mini_batch_size=minibatch, epochs=1, seed=1,
        dataloader_kwargs={"shuffle": False}, calculate_entropy=False,
    )  # fmt: skip
    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    # 3. a checkpoint, and back to it
    checkpoint = str(folder / "global_step_1" / "actor")
    worker.save_checkpoint(checkpoint, global_step=1)
    torch.distributed.barrier()
    with torch.no_grad():
        for parameter in worker.engine.module.parameters():
            parameter.mul_(0.5)
    spoilt = own_logps()
    worker.load_checkpoint(checkpoint)
    loaded = own_logps()
    if rank == 0:
        expected = hand(folder / "model", sequences, old, ranks, minibatch)
        result = {
            "losses": metrics["loss"], "norms": metrics["grad_norm"], "logps": logps,
            "metrics": {k: [float(x) for x in v] for k, v in metrics.items() if isinstance(v, list)},
            "spoilt": spoilt, "loaded": loaded,
            **expected,
        }  # fmt: skip
        print("RESULT " + json.dumps(result), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
