"""Chunked log-probs against the full logits, in value, gradient and what is kept in memory."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mintrl_env.errors import UsageError
from mintrl_env.trainers.logprobs import sequence_logprobs, token_logprobs

torch.set_num_threads(1)
V, H = 11, 4


def make(seed: int, shape: tuple[int, ...] = (2, 5)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.float64, generator=g).requires_grad_()

    return normal(*shape, H), normal(V, H), normal(V), torch.randint(V, shape, generator=g)


def full(hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, t: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias) / t
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def test_value_by_hand() -> None:
    # One token, logits (2, 0) / 2 = (1, 0): log-prob of id 0 is 1 - log(e + 1).
    value = token_logprobs(
        torch.ones(1, 1, 1), torch.tensor([[2.0], [0.0]]), torch.tensor([[0]]), temperature=2.0
    )
    assert value.item() == pytest.approx(1 - math.log(math.e + 1), abs=1e-7)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    chunk=st.integers(1, 12),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    with_bias=st.booleans(),
)
def test_equal_to_full_logits_with_gradients(
    seed: int, chunk: int, temperature: float, with_bias: bool
) -> None:
    hidden, weight, bias, ids = make(seed)
    used = bias if with_bias else None
    wanted = [hidden, weight] + ([bias] if with_bias else [])
    upstream = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = full(hidden, weight, used, ids, temperature)
    actual = token_logprobs(
        hidden, weight, ids, bias_V=used, temperature=temperature, chunk_tokens=chunk
    )
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad((actual * upstream).sum(), wanted),
        torch.autograd.grad((expected * upstream).sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_gradient_equals_finite_differences() -> None:
    hidden, weight, bias, ids = make(0, (3,))
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_logprobs(h, w, ids, bias_V=b, temperature=0.7, chunk_tokens=2),
        (hidden, weight, bias),
    )


def test_a_frozen_head_or_trunk_gets_no_gradient() -> None:
    hidden, weight, _, ids = make(0)
    token_logprobs(hidden, weight.detach(), ids).sum().backward()
    assert hidden.grad is not None
    token_logprobs(hidden.detach(), weight, ids).sum().backward()
    assert weight.grad is not None
    assert not token_logprobs(hidden.detach(), weight.detach(), ids).requires_grad


def test_full_logits_are_never_held() -> None:
    # What autograd saves, and the largest tensor any operator makes, forward and backward.
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        cells = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple) else (out,):
                if isinstance(t, Tensor):
                    Largest.cells = max(Largest.cells, t.numel())
            return out

    tokens, width, vocab, chunk = 64, 4, 500, 8
    hidden = torch.randn(1, tokens, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    saved: list[int] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t.numel())
        return t

    with Largest(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        token_logprobs(
            hidden, weight, torch.zeros(1, tokens, dtype=torch.long), chunk_tokens=chunk
        ).sum().backward()
    assert Largest.cells == chunk * vocab  # 4000, where full logits have 32000
    assert max(saved) == vocab * width  # the weight itself


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    hidden, weight, _, ids = make(2)
    h, w = hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_()
    value = token_logprobs(h, w, ids, chunk_tokens=3)
    assert value.dtype == torch.float32
    logits = torch.nn.functional.linear(h, w).float()
    expected = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    value.sum().backward()
    assert w.grad is not None and w.grad.dtype == torch.bfloat16


def test_autocast_gives_float32_gradients_to_float32_weights() -> None:
    hidden, weight, _, ids = make(3)
    h, w = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = token_logprobs(h, w, ids, chunk_tokens=3)
    expected = token_logprobs(h.bfloat16(), w.bfloat16(), ids, chunk_tokens=3)
    assert torch.equal(value, expected)
    value.sum().backward()
    assert h.grad is not None and h.grad.dtype == torch.float32
    assert w.grad is not None and w.grad.dtype == torch.float32


def test_no_token_is_no_problem() -> None:
    hidden, weight, _, _ = make(0)
    value = token_logprobs(hidden[:, :0], weight, torch.zeros(2, 0, dtype=torch.long))
    assert value.shape == (2, 0)
    value.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"ids_B_T": torch.zeros(2, 4, dtype=torch.long)}, "do not fit"),
        ({"lm_head_weight_V_H": torch.zeros(V, H + 1)}, "lm_head"),
    ],
)
def test_token_logprobs_refuses(change: dict[str, Any], message: str) -> None:
    hidden, weight, _, ids = make(0)
    arguments = {"hidden_B_T_H": hidden, "lm_head_weight_V_H": weight, "ids_B_T": ids}
    with pytest.raises(UsageError, match=message):
        token_logprobs(**(arguments | change))


# --- a transformers model -----------------------------------------------------------------------

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [0, 0, 3, 4, 5, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0]])  # the second padded on both sides


@pytest.fixture(scope="module")
def qwen() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).double().eval()


def by_full_logits(model: Any, row: list[int], temperature: float, vocab: int = 32) -> Tensor:
    """Log-probs of one unpadded row, 0 for its first token."""
    ids = torch.tensor([row])
    logits = model(ids).logits[0, :-1, :vocab] / temperature
    logp = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return torch.cat([logp.new_zeros(1), logp])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sequence_logprobs_equal_the_models_own(qwen: Any, temperature: float) -> None:
    actual = sequence_logprobs(qwen, IDS, MASK, temperature=temperature, chunk_tokens=3)
    expected = torch.zeros(2, 6, dtype=torch.float64)
    expected[0] = by_full_logits(qwen, [5, 6, 7, 8, 9, 10], temperature)
    expected[1, 2:5] = by_full_logits(qwen, [3, 4, 5], temperature)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    parameters = list(qwen.parameters())
    for a, b in zip(
        torch.autograd.grad(actual.sum(), parameters),
        torch.autograd.grad(expected.sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_keep_is_the_tail(qwen: Any) -> None:
    whole = sequence_logprobs(qwen, IDS, MASK)
    for keep in range(1, 7):
        torch.testing.assert_close(sequence_logprobs(qwen, IDS, MASK, keep=keep), whole[:, -keep:])
    one = sequence_logprobs(qwen, IDS[:, :1], MASK[:, :1])
    assert one.tolist() == [[0.0], [0.0]]


def test_vocab_size_masks_padding_rows(qwen: Any) -> None:
    actual = sequence_logprobs(qwen, IDS[:1], MASK[:1], vocab_size=20)[0]
    expected = by_full_logits(qwen, [5, 6, 7, 8, 9, 10], 1.0, vocab=20)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_absolute_positions_and_left_padding() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config).double().eval()
    actual = sequence_logprobs(model, IDS, MASK)
    torch.testing.assert_close(
        actual[1, 2:5], by_full_logits(model, [3, 4, 5], 1.0), rtol=1e-6, atol=1e-6
    )


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings:UserWarning")
def test_lora_counts_and_a_lora_head_is_refused(qwen: Any) -> None:
    import copy

    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(qwen), config).eval()
    actual = sequence_logprobs(model, IDS[:1], MASK[:1])[0]
    expected = by_full_logits(model, [5, 6, 7, 8, 9, 10], 1.0)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert (actual - sequence_logprobs(qwen, IDS[:1], MASK[:1])[0]).abs().max() > 1e-4

    head = peft.LoraConfig(r=2, target_modules=["lm_head"])
    model = peft.get_peft_model(copy.deepcopy(qwen), head)
    with pytest.raises(UsageError, match="lm_head"):
        sequence_logprobs(model, IDS, MASK)


def test_models_that_do_more_than_an_lm_head_are_refused(qwen: Any) -> None:
    with pytest.raises(UsageError, match="get_decoder"):
        sequence_logprobs(torch.nn.DataParallel(qwen), IDS, MASK)
    capped = SimpleNamespace(
        get_decoder=qwen.get_decoder,
        get_output_embeddings=qwen.get_output_embeddings,
        config=SimpleNamespace(final_logit_softcapping=30.0),
    )
    with pytest.raises(UsageError, match="final_logit_softcapping = 30"):
        sequence_logprobs(capped, IDS, MASK)


def test_sequence_logprobs_refuses_wrong_shapes(qwen: Any) -> None:
    with pytest.raises(UsageError, match="one shape"):
        sequence_logprobs(qwen, IDS, MASK[:, 1:])
    for keep in (0, 7):
        with pytest.raises(UsageError, match=r"1 \.\. 6"):
            sequence_logprobs(qwen, IDS, MASK, keep=keep)
