"""Replies of model servers on disk, so that a run can be replayed without asking again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mintrl_env.adapters.llm_faults import CallFailed
from mintrl_env.errors import JudgeCause, StoreError

_log = logging.getLogger(__name__)


class ReplyCache:
    """One JSON file a reply, named after a hash of the request.

    Sampling draws anew for every request, so the n-th time that a process makes one request it gets
    the n-th reply to it, unless a seed or temperature 0 says that all of them are alike.

    Args:
        folder: made where it is missing; several processes may share it.
        mode: "use" asks the server for what is not there or can't be read, and stores it; "replay"
            never asks.

    Raises:
        StoreError: the folder cannot be made or written.
    """

    def __init__(self, folder: str | Path, *, mode: Literal["use", "replay"] = "use") -> None:
        self.folder, self.mode = Path(folder), mode
        self._lock = threading.Lock()
        self._times: Counter[str] = Counter()
        self.hits = self.misses = 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be made: {error.strerror}") from error

    def key(self, path: str, body: Mapping[str, Any]) -> str:
        """The name of the reply that this request gets; asking for it again names the next one."""
        text = json.dumps([path, body], sort_keys=True, ensure_ascii=True)
        name = hashlib.blake2b(text.encode(), digest_size=20).hexdigest()
        if body.get("seed") is not None or body.get("temperature") == 0:
            return name
        with self._lock:
            times = self._times[name]
            self._times[name] += 1
        return f"{name}-{times}" if times else name

    def get(self, key: str) -> Any | None:
        """The stored reply, or None.

        Raises:
            CallFailed: none, and the cache may only replay.
        """
        try:
            reply = json.loads(self._file(key).read_text(encoding="utf-8"))
            self.hits += 1
            return reply
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            self.reject(key, str(error))
        self.misses += 1
        if self.mode == "replay":
            message = f"{self.folder} holds no reply to this request, and mode is replay"
            raise CallFailed(JudgeCause.INTERNAL, message, retry=False, tells=False)
        return None

    def reject(self, key: str, why: str) -> None:
        """A stored reply is of no use: another is asked for, and takes its place.

        Raises:
            CallFailed: the cache may only replay.
        """
        message = f"{self._file(key)} holds no reply that can be read: {why[:300]}"
        if self.mode == "replay":
            raise CallFailed(JudgeCause.INTERNAL, f"{message}; delete it", retry=False, tells=False)
        _log.warning("%s; the server is asked again", message)

    def put(self, key: str, reply: Any) -> None:
        """Store a reply; it appears whole or not at all.

        Raises:
            StoreError: it can't be written.
        """
        file = self._file(key)
        name = None
        try:
            file.parent.mkdir(exist_ok=True)
            handle, name = tempfile.mkstemp(dir=file.parent, prefix=".")
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(reply, stream)
            os.replace(name, file)
        except OSError as error:
            if name is not None:
                Path(name).unlink(missing_ok=True)
            raise StoreError(f"{file}: cannot be written: {error.strerror or error}") from error

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"
