"""One score from request to result. Every driver calls this.

A verifier is a service that may fail, and its failure is no verdict on the response:

    what happened                                 result
    a Score                                       the Score
    VerifierError, or any other exception         undecided, status "unavailable"
    UsageError, MissingExtraError                 raised: no later score would be any better
    an answer that is no Score                    UsageError

Cancellation passes through.
"""

from __future__ import annotations

from mintrl_env.errors import MissingExtraError, UsageError
from mintrl_env.protocols import Verifier
from mintrl_env.types import Score, Task

UNAVAILABLE = "unavailable"


async def score_response(verifier: Verifier, task: Task, text: str) -> Score:
    """The verifier's score of a whole response, final EOS left out.

    Raises:
        UsageError: the verifier broke its own rules (an infinite reward, an answer of another
            type). MissingExtraError: it needs a package that is not installed.
    """
    try:
        score = await verifier.score(task, text)
    except (UsageError, MissingExtraError):
        raise
    except Exception as error:
        return Score.undecided(UNAVAILABLE, f"{type(error).__name__}: {error}")
    if not isinstance(score, Score):
        raise UsageError(
            f"{type(verifier).__name__}.score answered {type(score).__name__}, not a Score: "
            'return Score(reward, "correct"), for instance'
        )
    return score
