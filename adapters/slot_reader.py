"""Forwards over slots: reading prompts into the cache, the common step, scoring.

What the model is asked for is always: these slots, these tokens at these positions, attending to
the columns of their own row up to the position. Prompts of unequal length are padded on the right;
the padding writes to a column that nobody sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mintrl_env.adapters.keyed_sampling import draw, token_logprobs
from mintrl_env.adapters.slot_cache import SlotCache
from mintrl_env.adapters.slot_table import Seats, SlotTable

_WIDE_VOCABULARY = 16384


class SlotReader:
    """Runs a model over the slots of a table.

    Args:
        model: the transformers model, called as it is.
        cache, table: where KV and tokens live.
        vocab_size: logits from here on are cut off.
        pad_id: fills ragged batches.
        prefill_tokens: the most tokens, padding included, of one forward that reads; a forward that
            scores keeps its logits under `prefill_tokens` * 16384 numbers besides.
        keep_option: whether the model's forward knows `logits_to_keep`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cache: SlotCache,
        table: SlotTable,
        *,
        vocab_size: int,
        pad_id: int,
        prefill_tokens: int,
        keep_option: bool,
    ) -> None:
        self.model, self.cache, self.table = model, cache, table
        self.vocab_size = vocab_size
        self._pad_id = pad_id
        self._prefill_tokens = prefill_tokens
        self._keep_option = keep_option
        weight = next(model.parameters())
        self._device: torch.device = weight.device
        self._columns_C = torch.arange(cache.columns, device=weight.device)
        self._shown = torch.zeros((), dtype=weight.dtype, device=weight.device)
        self._hidden = torch.full_like(self._shown, torch.finfo(weight.dtype).min)

    def step(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Feed every active row's last token and draw its next one.

        Returns:
            new ids and their log-probs at the rows' temperatures, shape (active,); not yet written
            to the table.
        """
        table, n = self.table, self.table.active
        temperature_n = table.temperature_S[:n]
        fed_n_1 = table.fed_S[:n, None]
        ids_n_1 = np.take_along_axis(table.tokens_S_C[:n], fed_n_1, axis=1).astype(np.int64)
        logits_n_V = self.forward(0, n, ids_n_1, fed_n_1, fed_n_1, 1)[:, -1]
        ids_n, logp_n = draw(
            logits_n_V,
            self._on_device(temperature_n),
            self._on_device(table.next_draws()),
            greedy=bool((temperature_n == 0).any()),
        )
        return ids_n.cpu().numpy(), logp_n.cpu().numpy()

    def read(self, seats: Seats) -> None:
        """Bring the KV of seated rows to their targets."""
        table, first = self.table, seats.first
        target_m = np.array([ask.target for ask in seats.asks], dtype=np.int64)
        lacks_m = target_m - table.fed_S[first : seats.last]
        lo = seats.feed
        while lo < seats.copies:
            # Rows come widest first: take as many as fit, none less than half as wide.
            hi, width = lo + 1, int(lacks_m[lo - first])
            while (
                hi < seats.copies
                and 2 * lacks_m[hi - first] >= width
                and (hi + 1 - lo) * width <= self._prefill_tokens
            ):
                hi += 1
            for _ in self._feed(lo, hi, target_m[lo - first : hi - first], keep=1):
                pass
            lo = hi
        if seats.source:
            copies = list(range(seats.copies, seats.last))
            self.cache.move(copies, seats.source, int(table.fed_S[seats.source].max()))
            table.fed_S[copies] = table.fed_S[seats.source]

    def score(self, seats: Seats, starts: Sequence[int]) -> list[npt.NDArray[np.float64]]:
        """Log-probs of each seated row's tokens from its start on; reads what it needs for that."""
        self.read(seats)
        table = self.table
        counts = [len(ask.ids) for ask in seats.asks]
        results = [np.empty(n - start) for n, start in zip(counts, starts, strict=True)]
        places = max(1, self._prefill_tokens * _WIDE_VOCABULARY // self.vocab_size)
        places = min(places, self._prefill_tokens)
        rows = max(1, places // 64)  # as many at once as leaves each a fair width
        for a in range(0, len(results), rows):
            part = slice(a, min(a + rows, len(results)))
            lo, hi = seats.first + part.start, seats.first + part.stop
            ends_m = np.array(counts[part], dtype=np.int64) - 1
            width = max(1, places // (hi - lo))
            for fed_m, real_m_W, logits_m_W_V in self._feed(lo, hi, ends_m, width=width):
                row_N, w_N = np.nonzero(real_m_W)
                at_N = fed_m[row_N] + w_N + 1
                next_N = table.tokens_S_C[lo + row_N, at_N].astype(np.int64)
                logits_N_V = logits_m_W_V[self._on_device(row_N), self._on_device(w_N)]
                logp_N = token_logprobs(logits_N_V, self._on_device(next_N)).cpu().numpy()
                for r in np.unique(row_N):
                    mine_N = row_N == r
                    results[a + r][at_N[mine_N] - starts[a + r]] = logp_N[mine_N]
        return results

    def _feed(
        self,
        lo: int,
        hi: int,
        ends_m: npt.NDArray[np.int64],
        *,
        keep: int = 0,
        width: int | None = None,
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], torch.Tensor]]:
        """Read slots lo to hi - 1 on to `ends_m` tokens of KV, in pieces of at most `width`.

        Yields:
            per piece: tokens of KV before it (m,), which of its places are real (m, W), and its
            logits (m, W or `keep`, vocab_size).
        """
        table = self.table
        widest = width or max(1, self._prefill_tokens // (hi - lo))
        while True:
            fed_m = table.fed_S[lo:hi].copy()
            left_m = ends_m - fed_m
            W = min(int(left_m.max()), widest)
            if W <= 0:
                return
            # Places past a row's end repeat its last position, but write to the scratch column.
            real_m_W = np.arange(W) < left_m[:, None]
            position_m_W = np.minimum(fed_m[:, None] + np.arange(W), ends_m[:, None] - 1)
            position_m_W = np.maximum(position_m_W, 0)
            ids_m_W = np.take_along_axis(table.tokens_S_C[lo:hi], position_m_W, axis=1)
            logits = self.forward(
                lo,
                hi,
                np.where(real_m_W, ids_m_W, self._pad_id).astype(np.int64),
                position_m_W,
                np.where(real_m_W, position_m_W, self.cache.scratch),
                keep,
            )
            table.fed_S[lo:hi] = np.maximum(fed_m, np.minimum(fed_m + W, ends_m))
            yield fed_m, real_m_W, logits

    def forward(
        self,
        lo: int,
        hi: int,
        ids_m_W: npt.NDArray[np.int64],
        position_m_W: npt.NDArray[np.int64],
        column_m_W: npt.NDArray[np.int64],
        keep: int,
    ) -> torch.Tensor:
        """One call of the model.

        Args:
            lo, hi: slots lo to hi - 1.
            ids_m_W, position_m_W, column_m_W: tokens, their positions, where their KV goes.
            keep: logits of the last `keep` places only; 0 for all.

        Returns:
            logits, shape (m, W or keep, vocab_size).
        """
        seen = int(position_m_W.max()) + 1
        position = self._on_device(position_m_W)
        self.cache.aim(lo, hi, self._on_device(column_m_W), seen)
        visible = self._columns_C[:seen] <= position[:, None, :, None]
        options = {"logits_to_keep": keep} if self._keep_option else {}
        output = self.model(
            input_ids=self._on_device(ids_m_W),
            attention_mask=torch.where(visible, self._shown, self._hidden),
            position_ids=position,
            past_key_values=self.cache,
            use_cache=True,
            **options,
        )
        logits: torch.Tensor = output.logits[..., : self.vocab_size]
        return logits

    def _on_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
