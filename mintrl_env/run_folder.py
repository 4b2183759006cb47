"""A run's folder: what is in it, and who may write to it.

config.yaml       the resolved config
attempt           how often the run was resumed
lock              held by the process that writes here
rollouts/         Parquet, `mintrl_env.store`
metrics.jsonl     a line an update, `mintrl_env.metrics`
checkpoints/      the trainer's
summary.json      the figures at the end
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from mintrl_env.config import RunConfig, config_differences, dump_config, load_config
from mintrl_env.errors import ConfigError, StoreError
from mintrl_env.store import RolloutStore

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# What a resumed run may change: how long it goes on and how it is watched.
_MAY_CHANGE = ("train.updates", "train.checkpoint_every", "train.keep_checkpoints",
               "train.report_to", "train.threads", "rollout.deadline_s", "evaluation", "probe",
               "preflight")  # fmt: skip


class RunFolder:
    """One run's folder.

    Args:
        path: the folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: IO[str] | None = None

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def store(self, name: str = "rollouts") -> RolloutStore:
        return RolloutStore(self.path / name)

    def open(
        self, config: RunConfig, *, resume: bool, asked: Mapping[str, Any] | None = None
    ) -> int:
        """Begin or resume a run here, and keep other processes out until `close`.

        Args:
            asked: what the command line says beside the config (a checkpoint, a count), which a
                resumed run may not change either.

        Returns:
            The run attempt: 0 for a new run, one more with every resume.

        Raises:
            StoreError: a run is here already and `resume` is False, another process is at work
                here, or the folder cannot be written.
            ConfigError: the run that is resumed had another config.
        """
        self.check(config, resume=resume, asked=asked)  # what is refused leaves no trace
        self._make()
        self._acquire()
        try:
            return self._begin(config, resume, asked or {})
        except BaseException:
            self.close()
            raise

    def check(
        self, config: RunConfig, *, resume: bool | None, asked: Mapping[str, Any] | None = None
    ) -> None:
        """Refuse what `open` would refuse for the run that is here; for calls before slow work.

        `resume` None: the command that asks has no --resume.
        """
        if not self.config_file.exists():
            return
        if not resume:
            go_on = "" if resume is None else "go on with it by --resume, or "
            raise StoreError(
                f"{self.path} holds a run already: {go_on}choose another folder with --run"
            )
        self._check_same(config)
        self._check_asked(asked or {})

    def finished(self, config: RunConfig) -> dict[str, Any] | None:
        """The summary of a run of exactly this config that has come to its end here, or None."""
        if not (self.config_file.exists() and self.summary_file.exists()):
            return None
        if load_config(self.config_file) != config:
            return None
        return dict(json.loads(self.summary_file.read_text()))

    def _begin(self, config: RunConfig, resume: bool, asked: Mapping[str, Any]) -> int:
        # Resuming what never began is a first start: a supervisor may always pass --resume.
        attempt = 0
        if self.config_file.exists():
            self.check(config, resume=resume, asked=asked)  # another may have begun meanwhile
            attempt = self._attempt() + 1
        if asked:
            write_json(self.path / "asked.json", asked)
        write_text(self.path / "attempt", f"{attempt}\n")
        write_text(self.config_file, dump_config(config))  # last: it says that a run has begun
        return attempt

    def forget(self) -> None:
        """Undo `open` for a new run that could not begin."""
        for name in ("config.yaml", "attempt", "asked.json"):
            (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Let other processes in again; closing twice is harmless."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".write-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise StoreError(
                f"{self.path}: the run folder cannot be written: {error.strerror}; choose another "
                "with --run"
            ) from error

    def _acquire(self) -> None:
        """Take the folder's lock, which the system gives back whatever ends this process."""
        if self._lock is not None:
            return
        path = self.path / "lock"
        try:
            lock = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise StoreError(f"{path}: cannot be written: {error.strerror}") from error
        if not _try_lock(lock):
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            lock.close()
            raise StoreError(
                f"{self.path}: {owner} is at work on this run; wait for its end or stop it, or "
                "choose another folder with --run"
            )
        lock.truncate(0)
        lock.write(f"process {os.getpid()}\n")
        lock.flush()
        self._lock = lock

    def _check_same(self, config: RunConfig) -> None:
        before = load_config(self.config_file)
        changed = [
            f"{key}: {old!r} -> {new!r}"
            for key, old, new in config_differences(before, config)
            if not any(key == name or key.startswith(name + ".") for name in _MAY_CHANGE)
        ]
        if config.train.updates < before.train.updates:
            changed.append(
                f"train.updates: {before.train.updates} -> {config.train.updates} (a run may only "
                "be made longer)"
            )
        if changed:
            raise ConfigError(
                f"{self.path} was begun with another config, so it can't go on with this one:\n  "
                + "\n  ".join(changed)
            )

    def _check_asked(self, asked: Mapping[str, Any]) -> None:
        file = self.path / "asked.json"
        before = json.loads(file.read_text()) if file.exists() else {}
        changed = [
            f"{k}: {before.get(k)!r} -> {v!r}" for k, v in asked.items() if before.get(k) != v
        ]
        if changed:
            raise ConfigError(f"{self.path} was begun with another {', '.join(changed)}")

    def _attempt(self) -> int:
        try:
            return int((self.path / "attempt").read_text())
        except (OSError, ValueError):
            return 0

    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint that was written whole."""
        found = []
        for path in self.checkpoints.glob("checkpoint-*"):
            match = _CHECKPOINT.fullmatch(path.name)
            # The trainer writes its state last.
            if match and (path / "trainer_state.json").is_file():
                found.append((int(match.group(1)), path))
        return max(found)[1] if found else None

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_json(self.summary_file, summary)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replace a JSON file at once; see `write_text`."""
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file at once, so that a kill leaves the old one or the new one.

    Raises:
        StoreError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error


def _try_lock(file: IO[str]) -> bool:
    """Lock an open file for this process; False where another one holds it."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system: nothing keeps two writers apart
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
