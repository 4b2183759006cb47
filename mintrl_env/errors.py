"""The errors of mintrl_env.

    MintrlError
    ├── UsageError           the caller broke a rule: an illegal event, an action that is too long
    ├── TaskError            a task row that cannot be used: file, line, field
    ├── ConfigError          one or more wrong config keys, all of them in one message
    ├── RegistryError        an unknown or doubly registered name
    ├── StoreError           a run folder or a Parquet part that cannot be read or written
    ├── MissingExtraError    an optional dependency is not installed; names the extra
    ├── PolicyError          the policy's engine failed
    ├── JudgeError           the judge failed; carries the cause that the review records
    └── VerifierError        the verifier failed; the row is undecided, never wrong

Mistakes of the caller and misbehaviour of a service are different classes: the first are bugs to be
fixed, the second are data (a review or a score with its cause) and never lose an episode.
"""

from __future__ import annotations

import sys
from enum import StrEnum


class MintrlError(Exception):
    """Base of every error that mintrl_env raises on purpose."""


class UsageError(MintrlError, ValueError):
    """A rule was broken by the caller; the object it was raised from is unchanged."""


class TaskError(MintrlError):
    """A task row is missing, malformed or unusable."""


class ConfigError(MintrlError):
    """A configuration is wrong; the message lists every problem with its key and file."""


class RegistryError(MintrlError):
    """A name is not registered, or is registered twice."""


class StoreError(MintrlError):
    """A run folder or one of its files cannot be used."""


class MissingExtraError(MintrlError, ImportError):
    """An optional dependency is missing, or what goes by its name cannot be imported.

    Raised where the import's own error is being handled, it tells the two apart.
    """

    def __init__(self, package: str, extra: str, why: str) -> None:
        self.package, self.extra = package, extra
        error = sys.exception()
        if isinstance(error, ImportError) and _is_there(error):
            super().__init__(
                f'{why} needs the package "{package}", and what goes by that name fails: {error}. Does '
                f'a file of yours hide it, or is it of another version than "mintrl-env[{extra}]" takes?'
            )
            return
        super().__init__(
            f'{why} needs the package "{package}", which is not installed: '
            f'pip install "mintrl-env[{extra}]"'
        )


def _is_there(error: ImportError) -> bool:
    """Whether the package was found, and something inside it was not."""
    if not isinstance(error, ModuleNotFoundError):
        return True
    top, _, rest = (error.name or "").partition(".")
    return bool(rest) and top in sys.modules


class PolicyError(MintrlError):
    """The engine behind the policy failed."""


class JudgeCause(StrEnum):
    """Why a review failed, as it is recorded and counted."""

    TIMEOUT = "timeout"
    CONNECTION = "connection"
    RATE_LIMIT = "rate_limit"
    SERVER = "server"
    AUTH = "auth"
    UNPARSED = "unparsed"
    BAD_STEP = "bad_step"
    BUDGET = "budget"
    INTERNAL = "internal"


class JudgeError(MintrlError):
    """The judge gave no usable verdict. `cause` is what the review records.

    `usage` is the `types.Usage` of what was spent all the same (an answer that could not be parsed
    costs what any other does); None: nothing.
    """

    def __init__(
        self, cause: JudgeCause | str, message: str = "", *, usage: object | None = None
    ) -> None:
        self.cause = JudgeCause(cause)
        self.usage = usage
        super().__init__(f"{self.cause.value}: {message}" if message else self.cause.value)


class VerifierError(MintrlError):
    """The verifier could not decide because of itself or a service, not because of the response."""
