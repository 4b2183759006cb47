"""The tinker hook: the loss by place, and tinker's own custom-loss code where it is installed.

`pip install tinker` (0.38.0 was used) beside the project runs the tests that are skipped else.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mintrl_env.adapters.tinker_loss import TinkerBatch, tinker_batch
from mintrl_env.errors import UsageError

_PATH = Path(__file__).with_name("other_trainers_parts.py")
_SPEC = importlib.util.spec_from_file_location("other_trainers_parts", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
parts = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(parts)

HAS_TINKER = importlib.util.find_spec("tinker") is not None


@dataclass(frozen=True)
class Datum:
    """The two fields of `tinker.types.Datum` (0.38.0) that are written."""

    model_input: list[int]
    loss_fn_inputs: dict[str, Tensor] = field(default_factory=dict)


@pytest.fixture(autouse=True)
def tinker_or_its_signature(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """tinker's types; where it is not installed, stand-ins of the same signature."""
    if not HAS_TINKER:
        made: Any = ModuleType("tinker")
        made.types = SimpleNamespace(Datum=Datum, ModelInput=SimpleNamespace(from_ints=list))
        monkeypatch.setitem(sys.modules, "tinker", made)
    yield


def whole(row: Any, response: Tensor) -> Tensor:
    """Log-probs of all target tokens: those of the prompt are noise that must not count."""
    return torch.cat([torch.full((len(row.prompt_ids) - 1,), 99.0).to(response), response])


def batch_of(rows: list[Any], **changes: Any) -> TinkerBatch:
    return tinker_batch(
        rows, **({"beta_2": parts.BETA_2, "variant": "const", "kappa": parts.KAPPA} | changes)
    )


def leaves_of(batch: TinkerBatch, rows: list[Any], logps: list[Tensor]) -> list[Tensor]:
    by_row = dict(zip(map(id, rows), logps, strict=True))
    return [whole(r, by_row[id(r)]).requires_grad_() for r in batch.rows]


@pytest.mark.parametrize("loss_scale", ["paper", "matched"])
@pytest.mark.parametrize("changes", parts.VARIANTS)
def test_loss_and_gradient_are_the_objectives(
    tmp_path: Path, changes: dict[str, Any], loss_scale: str
) -> None:
    rows = parts.stored(tmp_path)
    old, new = parts.logprobs(rows, 0), parts.logprobs(rows, 1)
    batch = batch_of(rows, loss_scale=loss_scale, **changes)
    with torch.no_grad():
        batch(batch.data, leaves_of(batch, rows, old))  # the first pass brings log pi_t
    leaves = leaves_of(batch, rows, new)
    loss, metrics = batch(batch.data, leaves)
    loss.backward()
    wanted, gradients, advantage_B = parts.expected(
        rows, new, old, loss_scale=loss_scale, **changes
    )
    assert loss.dtype == torch.float64 and loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    kept = [i for i, a in enumerate(advantage_B.tolist()) if not math.isnan(a)]
    assert [id(r) for r in batch.rows] == [id(rows[i]) for i in kept]
    assert batch.rows_left_out == 12 - len(kept)
    for row, leaf, place in zip(batch.rows, leaves, kept, strict=True):
        start = len(row.prompt_ids) - 1
        assert leaf.grad is not None and not leaf.grad[:start].any()
        assert torch.allclose(leaf.grad[start:], gradients[place], rtol=1e-12, atol=0)
    assert metrics["mintrl/valid_rows"] == len(kept)
    assert all(isinstance(value, float) for value in metrics.values())


def test_the_data_are_prompt_and_response_shifted(tmp_path: Path) -> None:
    rows = parts.stored(tmp_path)
    batch = batch_of(rows)
    assert [(r.task_id, r.rollout) for r in batch.rows] == [
        ("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 0), ("b", 2),
    ]  # fmt: skip
    for row, datum in zip(batch.rows, batch.data, strict=True):
        ids = [*row.prompt_ids.tolist(), *row.ids.tolist()]
        given = datum.model_input.to_ints() if HAS_TINKER else datum.model_input
        assert list(given) == ids[:-1]
        targets = datum.loss_fn_inputs["target_tokens"]
        assert (targets.to_torch() if HAS_TINKER else targets).tolist() == ids[1:]


def test_parts_of_an_update_add_up(tmp_path: Path) -> None:
    """An optimiser step of several calls: advantages, log pi_t and counts are the whole batch's."""
    rows = parts.stored(tmp_path)
    old, new = parts.logprobs(rows, 0), parts.logprobs(rows, 1)
    wanted, _, advantage_B = parts.expected(rows, new, old, loss_scale="matched")
    tokens = sum(int((r.provenance != parts.E).sum()) for r in (rows[i] for i in parts.TRAINED))
    total = 0.0
    for part in (slice(0, 3), slice(3, 12)):
        batch = batch_of(
            rows[part],
            loss_scale="matched",
            advantages=advantage_B[part],
            old_logprobs=[
                whole(r, o)
                for r, o, a in zip(rows[part], old[part], advantage_B[part], strict=True)
                if not math.isnan(a)
            ],
            denominator=6,
            mean_tokens=tokens / 6,
        )
        total += batch(batch.data, leaves_of(batch, rows[part], new[part]))[0].item()
    assert total == pytest.approx(float(wanted), rel=1e-12)


def test_nothing_to_train_on(tmp_path: Path) -> None:
    batch = batch_of(parts.stored(tmp_path)[8:])
    assert batch.data == [] and batch.rows_left_out == 4
    loss, metrics = batch([], [])
    assert float(loss) == 0.0 and metrics["mintrl/valid_rows"] == 0.0


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    rows = parts.stored(tmp_path)
    batch = batch_of(rows)
    leaves = leaves_of(batch, rows, parts.logprobs(rows, 0))
    with pytest.raises(UsageError, match="the loss of its own data"):
        batch(batch.data[::-1], leaves)
    with pytest.raises(UsageError, match="a/0: 3 log-probs for"):
        batch(batch.data, [torch.zeros(3), *leaves[1:]])
    with pytest.raises(UsageError, match="old_logprobs has 1 entries and the batch 6"):
        batch_of(rows, old_logprobs=[torch.zeros(3)])
    with pytest.raises(UsageError, match="kappa"):
        batch = batch_of(rows, kappa=None)


@pytest.mark.skipif(not HAS_TINKER, reason="tinker is not installed")
@pytest.mark.parametrize("changes", parts.VARIANTS)
def test_through_tinkers_own_client_code(tmp_path: Path, changes: dict[str, Any]) -> None:
    """`TrainingClient._compute_custom_loss` on a server's answer: the weights that it sends back
    are minus the gradient, so that its cross-entropy's gradient is ours. Its wire is float32."""
    from tinker import types
    from tinker.lib.public_interfaces.training_client import TrainingClient

    rows = parts.stored(tmp_path)
    old, new = parts.logprobs(rows, 0, torch.float32), parts.logprobs(rows, 1, torch.float32)
    batch = batch_of(rows, **changes)

    def answer(logps: list[Tensor]) -> Any:
        outputs = [
            {"logprobs": types.TensorData.from_torch(leaf.detach())}
            for leaf in leaves_of(batch, rows, logps)
        ]
        return types.ForwardBackwardOutput(
            loss_fn_output_type="x", loss_fn_outputs=outputs, metrics={}
        )

    TrainingClient._compute_custom_loss(batch.data, batch, answer(old))
    result = TrainingClient._compute_custom_loss(batch.data, batch, answer(new))
    wanted, gradients, advantage_B = parts.expected(rows, new, old, **changes)
    assert result.loss_sum == pytest.approx(float(wanted), rel=1e-5)
    assert set(result.metrics) >= {"mintrl/valid_rows", "mintrl/residual/abs_max"}
    kept = [i for i, a in enumerate(advantage_B.tolist()) if not math.isnan(a)]
    for row, datum, place in zip(batch.rows, result.data, kept, strict=True):
        start = len(row.prompt_ids) - 1
        sent = datum.loss_fn_inputs["weights"].to_torch()
        assert not sent[:start].any()
        assert torch.allclose(-sent[start:].double(), gradients[place], rtol=1e-4, atol=1e-7)
        assert set(datum.loss_fn_inputs) == {"target_tokens", "weights"}


@pytest.mark.skipif(not HAS_TINKER, reason="tinker is not installed")
def test_a_whole_forward_backward_custom(tmp_path: Path) -> None:
    """The public method, with the two requests to the server answered here."""
    from tinker import types
    from tinker.lib.public_interfaces.training_client import TrainingClient

    rows = parts.stored(tmp_path)
    new = parts.logprobs(rows, 1, torch.float32)
    batch = batch_of(rows, variant="proxy", kappa=None)
    sent: list[list[Any]] = []

    class Client(TrainingClient):  # type: ignore[misc]
        def __init__(self) -> None:
            self.holder = SimpleNamespace(estimate_bytes_count_in_datum=lambda datum: 8)
            self._taken = 0

        def _reserve_request_ids(self, count: int) -> list[int]:
            return list(range(count))

        def _chunked_requests_generator(self, data: Any) -> Any:
            yield SimpleNamespace(data=list(data), estimated_bytes_count=8)

        def _run_fwd_bwd(self, requests: Any, *_: Any, forward_only: bool) -> Any:
            data = [datum for request in requests for datum in request.data]
            sent.append(data)
            outputs = [
                {"logprobs": types.TensorData.from_torch(leaf.detach())}
                for leaf in leaves_of(batch, rows, new)
            ]

            async def result() -> Any:
                return types.ForwardBackwardOutput(
                    loss_fn_output_type="x", loss_fn_outputs=outputs, metrics={"loss:sum": 0.0}
                )

            return SimpleNamespace(result_async=result)

    output = Client().forward_backward_custom(batch.data, batch).result(timeout=60)
    wanted, gradients, _ = parts.expected(rows, new, new, variant="proxy", kappa=None)
    assert output.metrics["loss:sum"] == pytest.approx(float(wanted), rel=1e-5)
    assert output.metrics["mintrl/valid_rows"] == 6
    forward, backward = sent
    assert len(forward) == len(backward) == 6
    for row, datum, place in zip(batch.rows, backward, parts.TRAINED, strict=True):
        weights = datum.loss_fn_inputs["weights"].to_torch()
        assert torch.allclose(
            -weights[len(row.prompt_ids) - 1 :].double(), gradients[place], rtol=1e-4, atol=1e-7
        )
