"""Processes that are started ahead, since to start one takes longer than most tests run.

Only while they are asked for in quick succession, and not for long: soon after the last verdict
nothing but the zygote is left.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref

from mintrl_env.verifiers.sandbox import Limits, SandboxUnavailable
from mintrl_env.verifiers.sandbox_launch import (
    Launcher,
    LauncherDied,
    ZygoteLauncher,
    ZygoteLife,
)
from mintrl_env.verifiers.sandbox_process import Process

SPARES = 2
LIFE_S = 0.4
"""Seconds after which the zygote kills a spare that was not taken; none is taken after half of it."""

_Key = tuple[int, int]


class Spares:
    """The processes that wait at one launcher, all of them with the same limits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: _Key = (0, 0)
        self._waiting: list[tuple[float, Process]] = []
        self._asked = 0.0
        self._sweeping = False

    def take(self, limits: Limits, life_s: float) -> tuple[Process | None, int]:
        """A process that waits, or None; and how many are to be started in its place."""
        key, now = (limits.mem_mb, limits.output_bytes), time.monotonic()
        taken: Process | None = None
        useless = []
        with self._lock:
            busy = key == self._key and now - self._asked < LIFE_S / 2
            self._key, self._asked = key, now
            while self._waiting:
                born, spare = self._waiting.pop(0)
                assert isinstance(spare.life, ZygoteLife)
                if busy and now - born < LIFE_S / 2 and spare.life.take(life_s):
                    taken = spare
                    break
                useless.append(spare)
            missing = SPARES - len(self._waiting) if busy else 0
        for spare in useless:
            spare.close()
        if taken is not None:
            taken.started, taken.limits = time.monotonic(), limits
        return taken, missing

    def add(self, launcher: ZygoteLauncher, limits: Limits, life_s: float) -> None:
        """Start one more. Where that does not work, whoever needs a process will say so."""
        born = time.monotonic()
        with contextlib.suppress(LauncherDied, SandboxUnavailable):
            spare = Process(launcher, limits, life_s, spare_s=LIFE_S)
            with self._lock:
                self._waiting.append((born, spare))
                sweep, self._sweeping = not self._sweeping, True
            if sweep:
                self._sweep_later()

    def abandon(self) -> None:
        """In a forked child: these are the parent's."""
        for _, spare in self._waiting:
            spare.abandon()
        self._lock = threading.Lock()
        self._waiting, self._sweeping = [], False

    def _sweep_later(self) -> None:
        timer = threading.Timer(LIFE_S, self._sweep)
        timer.daemon = True
        timer.start()

    def _sweep(self) -> None:
        """Close what nobody has taken, so that no descriptor stays open for it."""
        oldest = time.monotonic() - LIFE_S / 2
        with self._lock:
            useless = [spare for born, spare in self._waiting if born < oldest]
            self._waiting = [entry for entry in self._waiting if entry[0] >= oldest]
            again = self._sweeping = bool(self._waiting)
        for spare in useless:
            spare.close()
        if again:
            self._sweep_later()


_spares: weakref.WeakKeyDictionary[ZygoteLauncher, Spares] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def start(launcher: Launcher, limits: Limits, life_s: float) -> Process:
    """A process for a module or for tests, one that waits where there is one.

    Raises:
        LauncherDied, SandboxUnavailable
    """
    if not isinstance(launcher, ZygoteLauncher):
        return Process(launcher, limits, life_s)
    with _lock:
        spares = _spares.get(launcher)
        if spares is None:
            spares = _spares[launcher] = Spares()
    process, missing = spares.take(limits, life_s)
    if process is None:
        process = Process(launcher, limits, life_s)
    for _ in range(missing):
        spares.add(launcher, limits, life_s)
    return process


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it when we were forked
    for spares in list(_spares.values()):
        spares.abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)
