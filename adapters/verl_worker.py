"""veRL's actor worker, whose learning rate can be scaled for an update (the re-warm-up)."""

from __future__ import annotations

from mintrl_env.errors import MissingExtraError

try:
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.workers.engine_workers import ActorRolloutRefWorker
except ImportError as error:
    raise MissingExtraError("verl", "verl", "the trainer mintrl_sync") from error


class MintrlActorWorker(ActorRolloutRefWorker):
    """As veRL's, and one call more."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator, unused-ignore]
    def scale_learning_rate(self, factor: float) -> None:
        """The next update's learning rate is the schedule's times `factor`.

        The schedule's step after the update sets the rate anew, so that factors do not pile up and a
        checkpoint holds the schedule's own.
        """
        engine = self.actor.engine
        rates = engine.lr_scheduler.get_last_lr()
        for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
