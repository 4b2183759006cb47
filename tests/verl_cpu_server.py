"""The model server of verl_cpu.py. It imports veRL late: its process may import this before veRL, and
veRL's plug-ins want the platform to be registered first."""

from __future__ import annotations

from typing import Any

import torch


class Server:
    """A replica's model server: samples from the weights that it was sent last."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.version = -1
        self.asleep = True

    async def set_weights(self, weights: dict[str, torch.Tensor], version: int) -> None:
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        self.version, self.asleep = version, False

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        assert not self.asleep, "asked while the actor trains"
        ids, logps = list(prompt_ids), []
        ends, temperature = sampling_params["stop_token_ids"], sampling_params["temperature"]
        with torch.inference_mode():
            while len(logps) < sampling_params["max_tokens"]:
                logits = self.model(torch.tensor([ids])).logits[0, -1]
                logp = torch.log_softmax(logits / temperature, -1)
                token = int(torch.multinomial(logp.exp(), 1))
                ids.append(token)
                logps.append(float(logp[token]))
                if token in ends:
                    break
        return TokenOutput(
            token_ids=ids[len(prompt_ids) :], log_probs=logps, stop_reason="completed",
            extra_fields={"global_steps": self.version},
        )  # fmt: skip

    async def sleep(self) -> None:
        self.asleep = True

    async def nothing(self, **_: Any) -> None:
        return None

    wake_up = clear_kv_cache = abort_all_requests = resume_generation = nothing


class OddLength:
    """A verifier: 1 where the response has an odd number of characters."""

    async def score(self, task: Any, response: str) -> Any:
        from mintrl_env.types import Score

        return Score(float(len(response) % 2), "scored")
