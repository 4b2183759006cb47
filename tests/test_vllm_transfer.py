"""Weights on their way to servers: batches, the place to meet, and vLLM's names as its source has them."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from mintrl_env.adapters.vllm_transfer import (
    NcclTransfer,
    batches,
    meeting_place,
    transfer_of,
)
from mintrl_env.errors import ConfigError, MissingExtraError


class Sent:
    def __init__(self) -> None:
        self.log: list[Any] = []

    def join(self, address: str, port: int, size: int) -> None:
        self.log.append((address, port, size))

    def send(self, tensor: Any) -> None:
        self.log.append(tuple(tensor.shape))

    def finish(self, timeout_s: float) -> None:
        self.log.append(timeout_s)


WEIGHTS = [
    ("a", torch.zeros(3, 2)),
    ("b", torch.zeros(5, dtype=torch.bfloat16)),
    ("c", torch.ones(1)),
]


def test_batches_say_what_they_send_and_send_it_when_told() -> None:
    sent = Sent()
    made = list(batches(WEIGHTS, sent, timeout_s=9.0, most=30))
    assert [batch.update_info for batch in made] == [
        {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[3, 2], [5]]},
        {"names": ["c"], "dtype_names": ["float32"], "shapes": [[1]]},
    ]
    assert sent.log == []
    for batch in made:
        assert batch.transfer is not None
        batch.transfer()
    assert sent.log == [(3, 2), (5,), 9.0, (1,), 9.0]


def test_ranks_that_only_gather_send_nothing_and_keep_nothing() -> None:
    gathered: list[str] = []

    def weights() -> Any:
        for name, tensor in WEIGHTS:
            gathered.append(name)
            yield name, tensor

    made = list(batches(weights(), None, timeout_s=9.0, most=30))
    assert [(batch.update_info, batch.transfer) for batch in made] == [({}, None)] * 2
    assert gathered == ["a", "b", "c"]


def test_where_servers_find_the_trainer() -> None:
    address, port = meeting_place(["http://127.0.0.1:8000/v1"], None)
    assert address == "127.0.0.1" and 1024 <= port < 65536
    assert meeting_place(["http://127.0.0.1:8000/v1"], "10.0.0.7")[0] == "10.0.0.7"
    with pytest.raises(
        ConfigError, match=r"no way to http://no-such-host.invalid.*transfer_address"
    ):
        meeting_place(["http://no-such-host.invalid:8000/v1"], None)


def test_transfers_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_transfer.py").write_text("class Mine:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert type(transfer_of("my_transfer:Mine")).__name__ == "Mine"
    for name, said in (("my_transfer:Other", "no attribute 'Other'"), ("no_mod:X", "No module")):
        with pytest.raises(ConfigError, match=f"transfer: {name} cannot be loaded: .*{said}"):
            transfer_of(name)
    try:
        import vllm  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtraError, match=r'pip install "mintrl-env\[vllm\]"'):
            NcclTransfer()


SOURCE = os.environ.get("MINTRL_VLLM_SOURCE", "")


@pytest.mark.skipif(not SOURCE, reason="MINTRL_VLLM_SOURCE names no vLLM source")
def test_vllm_has_what_the_nccl_transfer_calls() -> None:
    folder = Path(SOURCE) / "distributed"
    common = ast.parse((folder / "weight_transfer" / "nccl_common.py").read_text())
    init = next(
        n for n in common.body if isinstance(n, ast.FunctionDef) and n.name == "trainer_init"
    )
    assert [a.arg for a in init.args.args][:1] == ["init_info"]
    text = ast.unparse(init)
    assert all(
        f"init_info['{key}']" in text for key in ("master_address", "master_port", "world_size")
    )
    fields = next(
        n
        for n in common.body
        if isinstance(n, ast.ClassDef) and n.name == "NCCLWeightTransferInitInfo"
    )
    defaults = {
        n.target.id: None if n.value is None else ast.unparse(n.value)
        for n in fields.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    # What a server is told of the group names these; one broadcast a tensor is its default.
    assert {"master_address", "master_port", "rank_offset", "world_size"} <= defaults.keys()
    assert defaults["packed"] == "False"
    engine = ast.parse((folder / "weight_transfer" / "nccl_engine.py").read_text())
    update = next(
        n
        for n in engine.body
        if isinstance(n, ast.ClassDef) and n.name == "NCCLWeightTransferUpdateInfo"
    )
    names = {n.target.id for n in update.body if isinstance(n, ast.AnnAssign)}  # type: ignore[attr-defined]
    assert names == {"names", "dtype_names", "shapes"}
    pynccl = ast.parse((folder / "device_communicators" / "pynccl.py").read_text())
    methods = {
        f.name: [a.arg for a in f.args.args]
        for n in pynccl.body
        if isinstance(n, ast.ClassDef) and n.name == "PyNcclCommunicator"
        for f in n.body
        if isinstance(f, ast.FunctionDef)
    }
    assert methods["broadcast"][:4] == ["self", "tensor", "src", "stream"]
