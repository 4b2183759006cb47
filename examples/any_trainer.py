"""MInTRL's objective in a plain torch loop: what any other trainer has to do.

    python examples/any_trainer.py

A tiny random model and made-up rollouts: 4 prompts x (4 control + 4 intervened), with a correction
of 3 tokens in the middle of each intervened response. Runs in seconds on a CPU.
"""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mintrl_env.trainers import objective as mintrl
from mintrl_env.trainers.diagnostics import diagnostics
from mintrl_env.trainers.logprobs import sequence_logprobs

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, **sizes, **heads))
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)

# Rollouts, as a runner hands them over: padded ids, who wrote each token, a reward a row.
B, P, T, beta_2 = 32, 6, 16, 0.05
group = torch.arange(B) // 8
control = torch.arange(B) % 8 < 4
ids = torch.cat([torch.randint(64, (4, P))[group], torch.randint(64, (B, T))], dim=1)
lengths = torch.randint(10, T + 1, (B, 1))
provenance = torch.where(torch.arange(T) < lengths, mintrl.POLICY, mintrl.PAD)
provenance[~control, 5:8] = mintrl.INTERVENTION
mask = torch.cat([torch.ones(B, P), provenance != mintrl.PAD], dim=1).long()
rewards = (torch.rand(B) < torch.where(control, 0.2, 0.7)).float()
rewards[3] = torch.nan  # its verifier was down: undecided, neither right nor wrong

# Once an update: log pi_t, the anchor, and the advantage over the untouched rows of the group.
with torch.no_grad():
    old = sequence_logprobs(model, ids, mask, keep=T)
anchor = mintrl.anchor(old, provenance, kind="const", kappa=-0.2)
advantage = rewards - mintrl.control_baseline(rewards, control, group)
rows, tokens = mintrl.batch_counts(provenance, advantage)  # summed over ranks, if there are several
whole_batch = {"denominator": rows, "mean_tokens": tokens / rows}

for step in range(8):
    total = 0.0
    for part in torch.arange(B).split(8):  # micro-batches add up to the loss of the whole batch
        logp = sequence_logprobs(model, ids[part], mask[part], keep=T)
        batch = (logp, anchor[part], provenance[part], advantage[part])
        loss, _ = mintrl.mintrl_loss(*batch, beta_2=beta_2, loss_scale="matched", **whole_batch)
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad()
    print(f"step {step}  loss {total:.4f}")

with torch.no_grad():
    logp = sequence_logprobs(model, ids, mask, keep=T)
tensors = {"logp_B_T": logp, "old_logp_B_T": old, "anchor_B_T": anchor}
tensors |= {"provenance_B_T": provenance, "rewards_B": rewards, "advantage_B": advantage}
tensors |= {"is_control_B": control, "group_B": group}
for name, value in diagnostics(**tensors, beta_2=beta_2).items():
    print(f"{name:40} {value:9.4f}")
