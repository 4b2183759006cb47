"""What a model server can do for a policy, found out by asking it, before a run depends on it.

report = await probe_policy(client, "model", tokenizer, prompt_ids)
print(report); report.check()
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mintrl_env.adapters.llm_client import ModelClient
from mintrl_env.adapters.llm_faults import CallFailed
from mintrl_env.adapters.policy_server import ServerPolicy
from mintrl_env.adapters.policy_wires import LogprobsMode, WireName, read_chat_ids
from mintrl_env.chat import ChatMessage
from mintrl_env.errors import PolicyError
from mintrl_env.keys import RowKey
from mintrl_env.protocols import Sampling, Tokenizer
from mintrl_env.types import Chunk, Finish, IdsLike

_CLOSE = 0.05  # nats, between two log-probs of one token (servers compute in bfloat16)


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """What a server can do for a policy.

    Attributes:
        url, model: whom was asked.
        wire, logprobs_mode: for `ServerPolicy`; None where no form works.
        scores: whether it tells the log-probs of given ids.
        seeds: whether a seed decides what is sampled.
        problem: why it is unfit; "" where it is not.
        notes: what else a user should know.
    """

    url: str
    model: str
    wire: WireName | None = None
    logprobs_mode: LogprobsMode = "raw"
    scores: bool = False
    seeds: bool = False
    problem: str = ""
    notes: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise PolicyError where the server is unfit."""
        if self.problem:
            raise PolicyError(f"{self.url}, model {self.model!r}: {self.problem}")

    def __str__(self) -> str:
        lines = [
            f"server     {self.url}",
            f"model      {self.model}",
            f"ids        {'no: ' + self.problem if self.problem else self.wire}",
        ]
        if not self.problem:
            lines += [
                f"log-probs  {self.logprobs_mode}",
                f"scores     {'yes' if self.scores else 'no'}",
                f"seeds      {'yes' if self.seeds else 'no'}",
            ]
        return "\n".join([*lines, *(f"note       {note}" for note in self.notes)])


async def probe_policy(
    client: ModelClient,
    model: str,
    tokenizer: Tokenizer,
    prompt_ids: IdsLike,
    *,
    wires: Sequence[WireName] = ("vllm_completions", "vllm_generate", "llama_cpp"),
) -> PolicyReport:
    """Find the form in which a server takes and gives ids, and try it on a prompt.

    Args:
        prompt_ids: a prompt as a run would send it.
        wires: tried in this order; the first that generates is taken.
    """
    report = PolicyReport(client.base_url, model)
    ids = np.asarray(prompt_ids, dtype=np.int32)
    tried = []
    for wire in wires:
        policy = ServerPolicy(client, model, tokenizer, wire=wire, logprobs_mode="processed")
        try:
            chunk = await _sampled(policy, ids, 1.0)
        except PolicyError as error:
            tried.append(f"{wire}: {error}")
            continue
        try:
            return await _examined(replace(report, wire=wire), policy, ids, chunk)
        except PolicyError as error:
            return replace(report, wire=wire, problem=str(error))
    return replace(report, problem="it takes no ids in any form\n" + "\n".join(tried))


async def _examined(
    report: PolicyReport, policy: ServerPolicy, ids: npt.NDArray[np.int32], chunk: Chunk
) -> PolicyReport:
    notes = []
    again = await _sampled(policy, ids, 1.0)
    seeds = np.array_equal(again.ids, chunk.ids)
    if not seeds:
        notes.append("a seed does not decide what is sampled: runs are stored, not repeated")
    lost = await _lost_prefix(policy, ids)
    if lost:
        notes.append(lost)
    try:
        scores = await policy.logprobs(np.concatenate([ids, chunk.ids]), len(ids))
    except PolicyError as error:
        notes.append(f"no scores: {error}")
        return replace(report, seeds=seeds, notes=tuple(notes))
    off = _difference(scores, chunk.logprobs)
    if math.isnan(off):
        notes.append("it tells no log-probs of what it samples")
    elif off > _CLOSE:
        notes.append(f"log-probs of sampling and of scoring differ by up to {off:.2g} nats")
    # At another temperature log-probs that are scores belong to temperature 1.
    warm = await _sampled(policy, ids, 2.0)
    raw = await policy.logprobs(np.concatenate([ids, warm.ids]), len(ids))
    mode: LogprobsMode = "raw" if _difference(raw, warm.logprobs) <= _CLOSE else "processed"
    return replace(report, logprobs_mode=mode, scores=True, seeds=seeds, notes=tuple(notes))


async def _sampled(
    policy: ServerPolicy, ids: npt.NDArray[np.int32], temperature: float, count: int = 8
) -> Chunk:
    key = RowKey(0, 0, "probe", 0)
    return await policy.generate(
        ids, max_tokens=count, stop=(), sampling=Sampling(temperature), key=key
    )


async def _lost_prefix(policy: ServerPolicy, ids: npt.NDArray[np.int32]) -> str:
    """Four greedy tokens and four more are the eight that come at once, if it goes on from ids.

    Raises:
        PolicyError: not even the first is the same.
    """
    whole = await _sampled(policy, ids, 0.0, 8)
    first = await _sampled(policy, ids, 0.0, 4)
    if first.finish is Finish.EOS:
        return ""
    rest = await _sampled(policy, np.concatenate([ids, first.ids]), 0.0, 4)
    at_once, in_two = whole.ids.tolist(), [*first.ids.tolist(), *rest.ids.tolist()]
    if at_once == in_two:
        return ""
    said = f"asked for the likeliest tokens, it wrote {at_once} at once and {in_two} in two parts"
    if at_once[0] != in_two[0]:
        raise PolicyError(f"{said}: it samples at temperature 0, or reads other ids than were sent")
    return f"{said}: near ties, or it loses the prefix"


def _difference(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32] | None) -> float:
    """The largest, where both are known; NaN where nowhere."""
    if b is None or not np.isfinite(a - b).any():
        return math.nan
    return float(np.nanmax(np.abs(a - b)))


async def template_difference(
    client: ModelClient, model: str, messages: Sequence[ChatMessage], prompt_ids: IdsLike
) -> str:
    """How a vLLM server's chat template differs from ours on a prompt; "" where it does not.

    Raises:
        PolicyError: it doesn't tell the ids of its prompts.
    """
    body = {
        "model": model,
        "messages": [{"role": m.role, "content": m.content} for m in messages],
        "max_tokens": 1,
        "return_token_ids": True,
    }
    ours = [int(i) for i in prompt_ids]
    try:
        (theirs, _), _ = await client.call(
            "chat/completions", body, read_chat_ids, prompt_tokens=len(ours), max_tokens=1
        )
    except CallFailed as error:
        raise PolicyError(f"{error.cause}: {error}") from error
    if theirs == ours:
        return ""
    pairs = zip(ours, theirs, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    return (
        f"the server's prompt has {len(theirs)} ids, ours {len(ours)}; they differ from id {at} on "
        f"({theirs[at : at + 4]} there, {ours[at : at + 4]} here)"
    )
