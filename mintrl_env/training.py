"""`mintrl train`: one run from a config, through TRL's trainer, in one process or in several.

Under torchrun or `accelerate launch` every process is a rank with its own share of each update's
episodes. The main one alone writes the folder; all evaluate. A rank that fails ends, and its launcher
ends the others. What is needed of torch, transformers and TRL is imported when it runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from mintrl_env import judge_recipes, recipes
from mintrl_env.config import RunConfig
from mintrl_env.console import RunConsole
from mintrl_env.errors import ConfigError, MissingExtraError
from mintrl_env.evaluation import (
    EVALUATION,
    PROBE,
    evaluate_groups,
    keep_best,
    kept,
    sample,
    stored,
    summarise,
)
from mintrl_env.metrics import MetricsLog
from mintrl_env.preflight_gate import look_first, wanted
from mintrl_env.preflight_servers import check_servers
from mintrl_env.prompts import HFTokenizer
from mintrl_env.protocols import Guard
from mintrl_env.run_folder import RunFolder
from mintrl_env.served import ask_servers
from mintrl_env.trainer_settings import (
    check_split,
    patience_s,
    peft_config,
    refuse_sharding,
    trainer_config,
)
from mintrl_env.training_log import metrics_row, report_callback
from mintrl_env.trajectory import RolloutStats, Trajectory
from mintrl_env.types import Task

if TYPE_CHECKING:
    from mintrl_env.adapters.ranks import Ranks
    from mintrl_env.adapters.trl_trainer import MInTRLTrainer
    from mintrl_env.recipes import WarmupProgress

T = TypeVar("T")


def train(
    config: RunConfig,
    folder: RunFolder,
    *,
    resume: bool = False,
    preflight: bool | None = None,
    console: RunConsole | None = None,
) -> dict[str, Any]:
    """Run a config to its end and return the summary that is also written to the folder.

    `preflight` looks at a few tasks first (`preflight_gate`); None: by the config.

    Raises:
        MintrlError: the preflight found that the run should not begin.
        ConfigError, TaskError: something in the config or the tasks is wrong; nothing has run.
        StoreError: the folder holds another run, or cannot be written.
        JudgeError: the judge failed too often; what was finished is stored, `--resume` goes on.
    """
    with _ranks(config) as ranks:
        console = console or RunConsole()
        return _train(
            _Run(config, folder, console if ranks.is_main else console.silenced(), ranks),
            resume,
            preflight,
        )


def _ranks(config: RunConfig) -> AbstractContextManager[Ranks]:
    from mintrl_env.adapters.ranks import joined, launched

    if launched() > 1:  # before anybody waits for anybody
        refuse_sharding(os.environ)
        check_split(config, launched())
    return joined(patience_s(config))


def _train(run: _Run, resume: bool, preflight: bool | None) -> dict[str, Any]:
    folder, config, console = run.folder, run.config, run.console

    def finished() -> dict[str, Any] | None:
        folder.check(config, resume=resume)
        return folder.finished(config)

    summary = run.on_main(finished)
    if summary is not None:
        console.say(f"{folder.path} has come to its end already; these are its figures.")
        return summary
    run.prepare(preflight=run.on_main(lambda: wanted(config, preflight, folder)), asked=preflight)
    with run.parts:
        run.parts.callback(folder.close)
        attempt = run.on_main(lambda: folder.open(config, resume=resume))
        try:
            run.build(attempt)
            run.look_first()
        except BaseException:
            if attempt == 0 and run.ranks.is_main:
                folder.forget()  # nothing has run: the next start shall not find a run here
            raise
        try:
            return run.go()
        except KeyboardInterrupt:
            console.say(f"stopped after {run.done} update(s); --resume goes on from {folder.path}")
            raise


def _own(config: RunConfig, processes: int) -> RunConfig:
    """The config of one of several processes: with its share of what the judge may use."""
    if processes == 1 or config.judge is None:
        return config
    judge = judge_recipes.judge_share(config.judge, processes)
    return config.model_copy(update={"judge": judge})


class _Run:
    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        console: RunConsole,
        ranks: Ranks | None = None,
    ) -> None:
        from mintrl_env.adapters.ranks import OneRank

        self.config, self.folder, self.console = config, folder, console
        self.ranks: Ranks = ranks or OneRank()
        self.own = _own(config, self.ranks.count)
        self.trainer: MInTRLTrainer
        self.log: MetricsLog | None = None  # the main rank's
        self.parts = ExitStack()  # what has to be closed
        self.done = 0  # updates

    def on_main(self, what: Callable[[], T]) -> T:
        """What the main rank makes of it, on every rank."""
        from mintrl_env.adapters.ranks import on_main

        return on_main(self.ranks, what)

    def main_first(self, what: Callable[[], T]) -> T:
        """The same on every rank, on the main one first: it downloads, the others find it there."""
        from mintrl_env.adapters.ranks import main_first

        return main_first(self.ranks, what)

    # --- everything that can be refused, before the folder is touched

    def prepare(self, *, preflight: bool, asked: bool | None = None) -> None:
        config, several = self.config, self.ranks.count > 1
        if several and asked:
            raise ConfigError(
                f"--preflight works in one process, and this run has {self.ranks.count}: begin with "
                "`mintrl preflight CONFIG`, started alone"
            )
        if several and preflight:
            self.console.say("no preflight in several processes: `mintrl preflight` is one")
        self.looks_first = preflight and not several
        try:
            import torch
            import transformers  # noqa: F401
            import trl  # noqa: F401
        except ImportError as error:
            raise MissingExtraError(str(error.name), "trl", "mintrl train") from error
        torch.set_num_threads(config.train.threads)
        recipes.quiet_transformers()
        self.servers = check_servers(config) if preflight and self.ranks.is_main else []
        self.tasks = self.main_first(
            lambda: recipes.load_task_set(config.tasks, "tasks", seed=config.train.seed)
        )
        if len(self.tasks) < config.train.prompts_per_update:
            raise ConfigError(
                f"tasks: {len(self.tasks)} task(s) are fewer than train.prompts_per_update = "
                f"{config.train.prompts_per_update}"
            )
        self.verifier = recipes.make_verifier(config.tasks, self.tasks, "tasks")
        self.held_out: list[Task] = []
        if config.evaluation is not None:
            section = config.evaluation.tasks
            self.held_out = recipes.load_task_set(
                section, "evaluation.tasks", seed=config.train.seed
            )
        self.probe_tasks: list[Task] = []
        if config.probe is not None:
            section = config.probe.tasks
            self.probe_tasks = recipes.load_task_set(section, "probe.tasks", seed=config.train.seed)
        for tasks, where in (
            (self.held_out, "evaluation.tasks"),
            (self.probe_tasks, "probe.tasks"),
        ):
            _refuse_other_verifiers(self.tasks, tasks, where)
        refuse_overlap(self.tasks, self.held_out, "evaluation.tasks")
        with self.console.bar("models", 1) as advance:
            self.main_first(lambda: self._load(recipes.warmup_note(advance)))
            advance(1, "")
        tokenizer = HFTokenizer(self.tokenizer)
        self.guards: Sequence[Guard] = ()
        if config.judge is not None:
            self.guards = judge_recipes.make_guards(config.judge, tokenizer, self.verifier)
        prompts = recipes.make_prompts(tokenizer, config.policy)
        for tasks in (self.tasks, self.held_out, self.probe_tasks):
            recipes.check_prompts(prompts, tasks)
        if config.rollout.engine == "server":
            self.console.say(
                self.on_main(lambda: ask_servers(config, prompts, trained=True).said())
            )

    def _load(self, note: WarmupProgress) -> None:
        config = self.config
        self.judge = judge_recipes.make_judge(self.own, note)
        self.model_path = recipes.resolve_path(config.policy.path, config, note)
        self.tokenizer = recipes.load_tokenizer(self.model_path, "policy.path")

    # --- the trainer

    def build(self, attempt: int) -> None:
        from datasets import Dataset
        from transformers import PrinterCallback

        from mintrl_env.adapters.trl_trainer import MInTRLTrainer

        config = self.config
        by_id = {task.task_id: task for task in self.tasks}
        model = recipes.load_model(self.model_path, "policy.path", dtype=config.policy.dtype)
        if self.ranks.is_main:
            self.log = self.parts.enter_context(
                MetricsLog(self.folder.metrics_file, run_attempt=attempt)
            )
        self.trainer = MInTRLTrainer(
            model,
            args=trainer_config(self.own, self.folder.checkpoints, processes=self.ranks.count),
            train_dataset=Dataset.from_list(
                [{"prompt": task.prompt_text, "task_id": task.task_id} for task in self.tasks]
            ),
            processing_class=self.tokenizer,
            judge=self.judge,
            guards=self.guards,
            verifier=self.verifier,
            task_of=lambda row: by_id[row["task_id"]],
            prompts=lambda tokenizer: recipes.make_prompts(tokenizer, config.policy),
            store=self.folder.store(),
            run_attempt=attempt,
            peft_config=peft_config(config),
            callbacks=[report_callback(self)],
        )
        self.parts.callback(self.trainer.close)
        self.trainer.remove_callback(PrinterCallback)  # our own callback reports
        _ = self.trainer.session  # engines, judge and KV cache: what doesn't fit fails here

    def look_first(self) -> None:
        """A preflight of a few tasks, where one is wanted."""
        if self.looks_first:
            look_first(
                self.trainer.session, self.config, self.folder, self.tasks, verifier=self.verifier,
                evaluation=len(self.held_out), probe=len(self.probe_tasks), reports=self.servers,
                console=self.console)  # fmt: skip

    # --- the run

    def go(self) -> dict[str, Any]:
        config, started = self.config, time.monotonic()
        figures: dict[str, Any] = {}
        evaluation = config.evaluation
        if evaluation is not None and evaluation.before:
            figures["before"] = self.evaluate("before")
        if self.probe_tasks:
            figures["probe_before"] = self.probe("probe before")
        checkpoint = self.on_main(self.folder.last_checkpoint)
        with self.console.bar("training", config.train.updates) as self.advance:
            self.trainer.on_progress = self._in_update
            self.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        self.trainer.save_model(str(self.folder.path / "model"))
        if evaluation is not None and evaluation.after:
            figures["after"] = self.evaluate("after", fresh=True)
        if self.probe_tasks:
            figures["probe_after"] = self.probe("probe after", fresh=True)

        def summed() -> dict[str, Any]:
            summary = summarise(config, self.folder, figures)
            summary["wall_seconds"] = round(time.monotonic() - started, 1)
            self.folder.write_summary(summary)
            return summary

        return self.on_main(summed)

    def evaluate(self, name: str, *, fresh: bool = False) -> dict[str, Any]:
        """Accuracy on the held-out problems, by the policy alone; kept, so a resume has it."""
        assert self.config.evaluation is not None
        n = self.config.evaluation.n
        return self._kept(
            name,
            self.config.evaluation.model_dump(mode="json", include={"tasks", "n"}),
            fresh,
            lambda: evaluate_groups(
                self._sampled(f"evaluation {name}", self.held_out, EVALUATION, range(n), False)
            ),
        )

    def probe(self, name: str, *, fresh: bool = False) -> dict[str, Any]:
        """The judge on a frozen set of prompts: how often it revises, and what that brings."""
        assert self.config.probe is not None
        first = self.config.rollout.n_control
        rows = range(first, first + self.config.probe.n)
        return self._kept(
            name.replace(" ", "_"),
            self.config.probe.model_dump(mode="json"),
            fresh,
            lambda: RolloutStats.over(
                self._sampled(name, self.probe_tasks, PROBE, rows, True)
            ).as_dict(),
        )

    def _kept(
        self,
        name: str,
        asked: Mapping[str, Any],
        fresh: bool,
        compute: Callable[[], dict[str, Any]],
    ) -> dict[str, Any]:
        """`evaluation.kept`, computed by all ranks and written by the main one."""
        path = self.folder.path / "evaluation" / f"{name}.json"
        found = self.on_main(lambda: None if fresh else stored(path, asked))
        if found is None:
            result = compute()
            found = self.on_main(lambda: kept(path, asked, True, lambda: result))
        return found

    def _sampled(
        self, label: str, tasks: Sequence[Task], update: int, rows: range, reviewed: bool
    ) -> list[list[Trajectory]]:
        """The groups of all tasks, of which each rank rolls out its share."""
        count, total = self.ranks.count, len(tasks) * len(rows)
        with self.console.bar(label, total) as advance:
            mine = sample(
                self.trainer.session,
                tasks[self.ranks.rank :: count],
                update,
                rows,
                reviewed,
                lambda done, note: advance(min(done * count, total), note),
            )
            shares = self.ranks.gather(mine)
        return [shares[i % count][i // count] for i in range(len(tasks))]

    def _in_update(self, rows: int, total: int) -> None:
        note = "learning" if rows == total else f"{rows} of {total} rows"
        self.advance(self.done, f"update {self.done + 1}: {note}")

    def after_update(self, update: int, logs: dict[str, Any]) -> None:
        """Called by the trainer's callback once an update's optimiser steps are done."""
        row = metrics_row(logs)
        evaluation = self.config.evaluation
        done = self.done = update + 1
        if evaluation is not None and evaluation.every and done % evaluation.every == 0:
            result = self.evaluate(f"update-{done}", fresh=True)
            row["accuracy"], row["accuracy_ci95"] = result["accuracy"], result["ci95"]
            self.on_main(
                lambda: keep_best(
                    self.folder.path, done, result["accuracy"], self.trainer.save_model
                )
            )
        if self.log is not None:
            self.log.write(update, row)
        reward = row.get("reward")
        self.advance(done, "" if reward is None else f"reward {reward:.2f}")


def _refuse_other_verifiers(tasks: Sequence[Task], others: Sequence[Task], where: str) -> None:
    ours = {task.verifier for task in tasks}
    strange = sorted({task.verifier for task in others} - ours)
    if strange:
        raise ConfigError(
            f"{where}: these tasks are for the verifier {strange[0]!r}, those of `tasks` for "
            f"{min(ours)!r}, and a run has one verifier; use `mintrl eval` with a config of its own"
        )


def refuse_overlap(tasks: Sequence[Task], held_out: Sequence[Task], where: str) -> None:
    # The same problem with other blanks or line ends is the same problem.
    train = {" ".join(task.prompt_text.split()) for task in tasks}
    shared = [task.task_id for task in held_out if " ".join(task.prompt_text.split()) in train]
    if shared:
        raise ConfigError(
            f"{where}: {len(shared)} problem(s) are training prompts too (the first is "
            f"{shared[0]!r}): an accuracy on them would say nothing; use another split"
        )
