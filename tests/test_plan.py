"""The plan's simulation: cases by hand, what must always hold, and the command."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from mintrl_env.adapters.llm_limits import Gate, Limits
from mintrl_env.cli import app
from mintrl_env.config import RunConfig, parse_config
from mintrl_env.driving import Parts, RolloutConfig, drive
from mintrl_env.episode import Episode, EpisodeConfig
from mintrl_env.errors import ConfigError, UsageError
from mintrl_env.keys import RowKey
from mintrl_env.plan import Wanted, plan
from mintrl_env.plan_clock import Clock, Desk
from mintrl_env.plan_command import gather_figures
from mintrl_env.plan_engine import Engine, Job, Speed
from mintrl_env.plan_figures import TrainerFigures, gather, read_figures
from mintrl_env.plan_machines import Planned, judge_kind, judge_limits
from mintrl_env.plan_measured import measured, of_rows
from mintrl_env.plan_presets import GPUS, MODELS, preset, preset_for
from mintrl_env.plan_rows import Batches, Distribution, Habits, ReviewDraw, RowScript, script
from mintrl_env.plan_sim import simulate
from mintrl_env.plan_split import Needs, candidates, parse
from mintrl_env.plan_system import JudgeSystem, Mode, System
from mintrl_env.plan_tables import plan_table
from mintrl_env.prompts import ByteTokenizer
from mintrl_env.store import RolloutStore
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import (
    Chunk,
    Finish,
    Kind,
    Outcome,
    Provenance,
    Review,
    Score,
    StopReason,
    Task,
    Usage,
    Verdict,
)

# A busy machine makes drawing slow; that is no finding.
LAWS = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
ONE = Speed(((1, 1.0),))  # a second a token for each row: no gain from batches
EVEN = Speed(((1, 1.0), (1000, 1.0)))  # a second a step, whatever the rows


@dataclass(frozen=True)
class Groups:
    """The same groups of rows for every update."""

    each: Sequence[Sequence[RowScript]]

    @property
    def groups(self) -> int:
        return len(self.each)

    def group(self, index: int) -> list[RowScript]:
        return list(self.each[index % len(self.each)])


def row(
    length: int, *, k: int = 4, waits: Sequence[float] = (), verifier: float = 0.0, prompt: int = 1
) -> RowScript:
    """A row of so many tokens whose reviews all keep and take these seconds."""
    rules = EpisodeConfig(chunk_tokens=k, max_reviews=len(waits), max_response=10_000)
    luck = [ReviewDraw(False, 0.0, 0, wait, 1, 0, 1) for wait in waits]
    return script(rules, prompt=prompt, length=length, reviews=luck, verifier_s=verifier)


def system(speed: Speed = EVEN, engines: int = 1, **parts: Any) -> System:
    return System(speed, engines, **{"train_s": lambda tokens: 0.0, **parts})


def seconds(rows: Sequence[RowScript], machines: System) -> float:
    """Of one update of a group."""
    return simulate(machines, Groups([rows]), Mode(), updates=1).seconds


class TestEngine:
    def times(self, speed: Speed, jobs: Sequence[tuple[float, int, int]]) -> list[float]:
        """When each (arrival, tokens, tokens to read first) is done."""
        clock, ended = Clock(), {}
        engine = Engine(clock, speed)
        for i, (at, tokens, read) in enumerate(jobs):
            job = Job(tokens, read, read, lambda i=i: ended.setdefault(i, clock.now))  # type: ignore[misc]
            clock.at(at, lambda job=job: engine.submit(job))  # type: ignore[misc]
        assert clock.run(lambda: len(ended) == len(jobs))
        assert engine.counted().row_steps == sum(job[1] for job in jobs)
        return [ended[i] for i in range(len(jobs))]

    def test_two_rows_share_the_steps(self) -> None:
        # Steps of 2 s for two rows: 3 together, then 2 alone at 1 s.
        assert self.times(ONE, [(0, 3, 0), (0, 5, 0)]) == [6.0, 8.0]

    def test_who_arrives_waits_for_the_end_of_the_step(self) -> None:
        # Alone to 3 (the step from 2 to 3 is being made at 2.5), then steps of 2 s.
        assert self.times(ONE, [(0, 4, 0), (2.5, 1, 0)]) == [5.0, 5.0]
        assert self.times(EVEN, [(0, 4, 0), (2.5, 2, 0)]) == [4.0, 5.0]

    def test_an_arrival_at_a_boundary_waits_for_nothing(self) -> None:
        assert self.times(ONE, [(0, 4, 0), (2.0, 1, 0)]) == [5.0, 4.0]

    def test_slots_bound_the_batch(self) -> None:
        speed = replace(EVEN, slots=2)
        assert self.times(speed, [(0, 3, 0), (0, 5, 0), (0, 1, 0)]) == [3.0, 5.0, 4.0]

    def test_reading_and_letting_in_hold_everybody_up(self) -> None:
        speed = replace(EVEN, prefill_s=0.5, request_s=0.25, admit_s=2.0)
        # 2 + 4 * .5 + .25 before the first step.
        assert self.times(speed, [(0, 2, 4)]) == [6.25]
        # The second arrives while the first is read: one more pause, for both.
        assert self.times(speed, [(0, 2, 4), (1.0, 2, 0)]) == [8.5, 8.5]
        # The same, and .5 for the one that is at work by then.
        speed = replace(speed, admit_row_s=0.5)
        assert self.times(speed, [(0, 2, 4), (1.0, 2, 0)]) == [9.0, 9.0]

    def test_context_makes_steps_longer(self) -> None:
        # Steps of 1 + .5 * context, the context 2, 3, 4.
        speed = replace(EVEN, context_s=0.5)
        assert self.times(speed, [(0, 3, 2)]) == [pytest.approx(2.0 + 2.5 + 3.0)]
        # Another at 3.0, in the second step: it begins at 4.5 with contexts 4 and 0.
        assert self.times(speed, [(0, 3, 2), (3.0, 1, 0)]) == [pytest.approx(7.5)] * 2

    def test_a_hold_begins_after_the_step_and_ends_in_time(self) -> None:
        clock, ended = Clock(), []
        engine = Engine(clock, EVEN)
        engine.submit(Job(4, 0, 0, lambda: ended.append(clock.now)))
        clock.at(1.5, lambda: engine.hold(3.0))
        assert clock.run(lambda: bool(ended))
        assert ended == [6.5]  # two steps to 2.0, held to 4.5, two more
        assert engine.counted().busy == 4.0

    def test_a_cancelled_row_leaves_at_the_next_step(self) -> None:
        clock, ended = Clock(), []
        engine = Engine(clock, ONE)
        slow, fast = Job(100, 0, 7, lambda: ended.append(-1.0)), None
        fast = Job(4, 0, 0, lambda: ended.append(clock.now))
        engine.submit(slow)
        engine.submit(fast)
        clock.at(3.0, lambda: engine.cancel(slow))
        assert clock.run(lambda: bool(ended))
        assert ended == [6.0]  # two steps of 2 s, two of 1 s
        assert not engine.rows and engine._context == 0

    @LAWS
    @given(
        st.lists(
            st.tuples(st.floats(0, 20), st.integers(1, 12), st.integers(0, 5)),
            min_size=1,
            max_size=12,
        ),
        st.integers(1, 4),
        st.floats(0, 0.2),
    )
    def test_every_job_ends_and_nothing_is_faster_than_alone(
        self, jobs: list[tuple[float, int, int]], slots: int, context: float
    ) -> None:
        speed = Speed(((1, 1.0), (4, 1.6)), 0.1, 0.05, context, slots, 0.02)
        ended = self.times(speed, jobs)
        for (at, tokens, read), end in zip(jobs, ended, strict=True):
            alone = tokens * (1.0 + context * read) + read * 0.1 + 0.05
            assert end >= at + alone - 1e-6

    def test_steps_between_and_beyond_the_measured_sizes(self) -> None:
        speed = Speed.of_throughput({1: 10.0, 4: 20.0, 8: 32.0})
        assert [speed.step(n) for n in (1, 2, 4, 6, 8, 12)] == pytest.approx(
            [0.1, 0.1 + 0.1 / 3, 0.2, 0.225, 0.25, 0.3]
        )
        assert Speed.of_throughput({4: 40.0}).step(8) == pytest.approx(0.2)
        assert speed.times(0.5).step(6) == pytest.approx(0.1125)


class TestDesk:
    def test_places_and_busy_time(self) -> None:
        clock, log = Clock(), []
        desk = Desk(clock, 2)

        def served(name: str, takes: float) -> None:
            def done() -> None:
                log.append((name, clock.now))
                desk.leave()

            desk.enter(lambda: desk.work(takes, done))

        for name, takes in (("a", 3.0), ("b", 1.0), ("c", 1.0)):
            served(name, takes)
        assert clock.run(lambda: len(log) == 3)
        assert log == [("b", 1.0), ("c", 2.0), ("a", 3.0)]
        assert desk.busy() == 5.0

    def test_a_clock_with_nothing_left_says_so(self) -> None:
        assert not Clock().run(lambda: False)


class TestRows:
    @LAWS
    @given(st.data())
    def test_a_script_is_what_the_rules_make_of_the_same_chunks(self, data: st.DataObject) -> None:
        """Against the real Episode: chunk limits, reviews, lengths, corrections."""
        rules = EpisodeConfig(
            chunk_tokens=data.draw(st.integers(1, 9)),
            max_reviews=data.draw(st.integers(0, 4)),
            max_correction=data.draw(st.integers(0, 5)),
            max_response=data.draw(st.integers(1, 40)),
            spacing=data.draw(st.integers(0, 6)),
            step_delimiters=("x",),  # each byte is a step: a cut may fall anywhere
        )
        length = data.draw(st.integers(1, 50))
        luck = [
            ReviewDraw(data.draw(st.booleans()), data.draw(st.floats(0, 1)), 3, 1.0, 1, 0, 1)
            for _ in range(rules.max_reviews)
        ]
        made = script(rules, prompt=3, length=length, reviews=luck)
        tokenizer = ByteTokenizer()
        (eos,) = tokenizer.eos_ids
        asked: list[int] = []

        class Writer:
            async def generate(self, ids: Any, *, max_tokens: int, **_: Any) -> Chunk:
                tokens = min(max_tokens, max(1, length - (len(ids) - 3)))
                out = [ord("x")] * tokens
                ends = len(ids) - 3 + tokens >= length
                if ends:
                    out[-1] = eos
                asked.append(tokens)
                finish = Finish.EOS if ends else Finish.LENGTH
                return Chunk(np.array(out), np.zeros(tokens), finish, 0)

        class Reviser:
            async def review(self, request: Any) -> Verdict:
                draw = luck[request.review]
                if not draw.revises:
                    return Verdict.keep()
                tokens = len(request.chunk_ids)
                cut = min(int(draw.kept * tokens), tokens - 1)
                step = next(i for i, s in enumerate(request.steps) if s.cut >= cut)
                if request.steps[step].cut != cut:  # EOS is no step of its own
                    return Verdict.keep()
                return Verdict.revise(step, [ord("y")] * draw.correction)

        episode = Episode(
            Task("t", "abc", "1"), [1, 2, 3], kind=Kind.INTERVENED, tokenizer=tokenizer,
            config=rules, key=RowKey(0, 0, "t", 0, 0),
        )  # fmt: skip
        config = RolloutConfig(episode=rules)
        asyncio.run(drive(episode, Parts(Writer(), Reviser()), config))
        # A cut that no step of bytes allows (before an EOS) was a Keep here.
        assume(all(luck[r.index].revises == (r.outcome is Outcome.REVISE) for r in episode.reviews))
        assert asked == [segment.tokens for segment in made.segments]
        assert len(episode) == made.response
        assert int((episode.provenance == Provenance.INTERVENTION).sum()) == made.corrected
        assert len(episode.reviews) == len(made.reviews)
        assert episode.need.stop_reason is (  # type: ignore[union-attr]
            StopReason.LENGTH if made.truncated else StopReason.EOS
        )

    def test_a_revise_by_hand(self) -> None:
        rules = EpisodeConfig(chunk_tokens=8, max_reviews=2, max_correction=3, max_response=100)
        luck = [ReviewDraw(True, 0.5, 5, 1.0, 2, 10, 20), ReviewDraw(False, 0.0, 0, 2.0, 1, 10, 30)]
        made = script(rules, prompt=4, length=12, reviews=luck)
        # 8 written, 4 kept, 3 corrected (L): at 7; 5 to the end at 12, reviewed.
        assert [(s.tokens, s.fresh, s.context) for s in made.segments] == [(8, 4, 4), (5, 3, 11)]
        assert [(r.prompt_tokens, r.completion_tokens, r.calls) for r in made.reviews] == [
            (4 + 8 + 10, 20, 2),
            (11 + 5 + 10, 30, 1),
        ]
        assert (made.response, made.corrected, made.sampled, made.revises) == (12, 3, 13, 1)
        assert not made.truncated

    def test_a_control_writes_in_one_go(self) -> None:
        rules = EpisodeConfig(max_response=16)
        made = script(rules, prompt=4, length=40, reviews=())
        assert [s.tokens for s in made.segments] == [16] and made.truncated

    def batches(self, **changes: Any) -> Batches:
        habits = Habits(
            Distribution(20.0), Distribution.log_normal(30.0, 90.0), revise=0.4,
            correction_tokens=Distribution(3.0), latency_s=Distribution.log_normal(1.0, 9.0),
        )  # fmt: skip
        rules = EpisodeConfig(chunk_tokens=8, max_reviews=3, max_correction=4, max_response=200)
        return Batches(replace(habits, **changes), rules, 4, 2, 2, True, 7)

    def test_draws_depend_on_the_seed_and_on_one_figure_each(self) -> None:
        first, again = self.batches(), self.batches()
        assert first.group(5) == again.group(5) != first.group(4)
        assert replace(first, seed=8).group(5) != first.group(5)
        slower = self.batches(latency_s=Distribution.log_normal(2.0, 18.0)).group(5)
        for a, b in zip(first.group(5), slower, strict=True):
            assert [s.tokens for s in a.segments] == [s.tokens for s in b.segments]
            assert [r.seconds * 2 for r in a.reviews] == pytest.approx(
                [r.seconds for r in b.reviews]
            )
        assert [bool(r.reviews) for r in first.group(0)] == [False, False, True, True]
        assert not any(r.reviews for r in replace(first, judged=False).group(0))

    def test_distributions_have_the_shape_that_was_asked_for(self) -> None:
        rng = np.random.default_rng(0)
        drawn = Distribution.log_normal(2.0, 20.0).draw(rng, (40_000,))
        assert np.quantile(drawn, (0.5, 0.99)) == pytest.approx([2.0, 20.0], rel=0.06)
        drawn = Distribution.log_normal(2.0, 20.0, "p95").draw(rng, (40_000,))
        assert np.quantile(drawn, 0.95) == pytest.approx(20.0, rel=0.06)
        assert np.mean(drawn) == pytest.approx(
            Distribution.log_normal(2.0, 20.0, "p95").mean, rel=0.2
        )
        uniform = Distribution(ends=(1.0, 3.0))
        assert uniform.mean == 2.0 and uniform.draw(rng, (9,)).min() >= 1
        values = Distribution(values=(1.0, 4.0))
        assert set(values.draw(rng, (99,)).tolist()) == {1.0, 4.0} and values.mean == 2.5
        assert Distribution(5.0).draw(rng, (2, 1)).tolist() == [[5.0], [5.0]]
        with pytest.raises(UsageError, match="0 < median <= p99"):
            Distribution.log_normal(3.0, 2.0)


class TestByHand:
    def test_two_episodes_on_one_engine(self) -> None:
        rows = [row(4), row(6)]
        assert seconds(rows, system(ONE)) == 10.0  # 4 steps of 2 s, 2 of 1 s
        assert seconds(rows, system(EVEN)) == 6.0
        assert seconds(rows, system(ONE, engines=2)) == 6.0

    def test_a_review_between_two_chunks(self) -> None:
        judge = JudgeSystem()
        # 4 tokens, 5 s, 4 tokens; the other writes on meanwhile.
        rows = [row(8, waits=[5.0]), row(12)]
        assert seconds(rows, system(EVEN, judge=judge)) == 13.0
        assert seconds(rows, system(EVEN)) == 12.0, "nobody reviews"

    def test_places_at_the_judge(self) -> None:
        rows = [row(5, waits=[10.0])] * 3
        assert seconds(rows, system(EVEN, judge=JudgeSystem())) == 15.0
        assert seconds(rows, system(EVEN, judge=JudgeSystem(concurrent=1))) == 4 + 30 + 1

    @pytest.mark.parametrize(("calls", "rpm"), [(3, 1), (7, 3), (6, 3), (10, 60)])
    def test_so_many_calls_at_a_limit_a_minute(self, calls: int, rpm: int) -> None:
        """Any 60 seconds hold at most rpm: the last begins after (N - 1) // rpm whole minutes,
        which at rpm 1 are (N - 1) * 60 / rpm seconds."""
        judge = JudgeSystem(booker=lambda clock: Gate(Limits(rpm=rpm), clock=clock))
        took = seconds([row(5, waits=[2.0])] * calls, system(EVEN, judge=judge))
        assert took == 4 + (calls - 1) // rpm * 60 + 2 + 1

    def test_tokens_a_minute(self) -> None:
        # A review reads 1 + 4 tokens and writes 1: two of them a minute at tpm 12.
        judge = JudgeSystem(booker=lambda clock: Gate(Limits(tpm=12), clock=clock))
        assert seconds([row(5, waits=[2.0])] * 5, system(EVEN, judge=judge)) == 4 + 120 + 2 + 1

    def test_calls_of_one_review_come_one_after_another(self) -> None:
        luck = [ReviewDraw(False, 0.0, 0, 6.0, 3, 0, 1)]
        rules = EpisodeConfig(chunk_tokens=4, max_reviews=1)
        made = script(rules, prompt=1, length=5, reviews=luck)
        assert seconds([made], system(EVEN, judge=JudgeSystem())) == 11.0
        judge = JudgeSystem(booker=lambda clock: Gate(Limits(rpm=1), clock=clock))
        assert seconds([made], system(EVEN, judge=judge)) == 4 + 120 + 2 + 1

    def test_a_judge_on_engines_of_its_own_and_on_the_policys(self) -> None:
        luck = [ReviewDraw(False, 0.0, 0, 99.0, 1, 5, 3)]
        rules = EpisodeConfig(chunk_tokens=4, max_reviews=1)
        made = script(rules, prompt=1, length=5, reviews=luck)
        own = JudgeSystem(engine=replace(EVEN, prefill_s=0.1), engines=1)
        # 4, then 1 + 4 + 5 tokens read and 3 written, then 1.
        assert seconds([made], system(EVEN, judge=own)) == pytest.approx(4 + 1 + 3 + 1)
        shared = JudgeSystem(shared=True)
        assert seconds([made], system(ONE, judge=shared)) == 8.0
        assert seconds([made, row(8)], system(ONE, judge=shared)) == 16.0

    def test_verifier_workers(self) -> None:
        rows = [row(4, verifier=3.0)] * 4
        assert seconds(rows, system()) == 7.0
        assert seconds(rows, system(verifier_workers=2)) == 10.0
        assert seconds(rows, system(verifier_workers=2, verifier_factor=0.5)) == 7.0

    def test_a_prompt_is_read_once_a_group_and_engine(self) -> None:
        speed = replace(EVEN, prefill_s=0.5)
        rows = [row(4, prompt=10)] * 4
        assert seconds(rows, system(speed)) == 5 + 4
        assert seconds(rows, system(speed, prefix_cache=False)) == 20 + 4
        assert seconds(rows, system(speed, engines=2)) == 5 + 4

    def test_without_a_prefix_cache_a_chunk_reads_all_before_it(self) -> None:
        speed, judge = replace(EVEN, prefill_s=0.5), JudgeSystem()
        rows = [row(8, prompt=10, waits=[1.0])]
        assert seconds(rows, system(speed, judge=judge)) == 5 + 4 + 1 + 4
        assert seconds(rows, system(speed, judge=judge, prefix_cache=False)) == 5 + 4 + 1 + 7 + 4

    def test_a_window_of_rows(self) -> None:
        assert seconds([row(4)] * 5, system(in_flight=2)) == 12.0

    def test_a_deadline_ends_a_row_and_frees_its_place(self) -> None:
        outcome = simulate(
            system(ONE, deadline_s=5.0), Groups([[row(3), row(100)]]), Mode(), updates=1
        )
        # Steps of 2 s: the first would end at 6, so both are late at 5, and learning begins.
        assert outcome.seconds == 5.0
        assert outcome.window.late == 2

    def test_learning_and_new_weights(self) -> None:
        machines = system(EVEN, train_s=lambda tokens: float(sum(tokens)), sync_s=2.0)
        outcome = simulate(machines, Groups([[row(4), row(6)]]), Mode(), updates=3)
        assert outcome.window.at == 3 * (6 + 12 + 2)
        assert (outcome.seconds, outcome.window.train_s, outcome.window.sync_s) == (20.0, 36.0, 6.0)
        assert (outcome.rollout_s, outcome.tail_s) == (6.0, 2.0)
        assert outcome.window.policy_busy == 18.0

    def test_one_step_overlaps_and_has_a_barrier(self) -> None:
        machines = system(EVEN, train_s=lambda tokens: 4.0, sync_s=1.0)
        rows = Groups([[row(6)]])
        outcome = simulate(machines, rows, Mode("one-step"), updates=4, skip=1)
        assert outcome.seconds == 7.0, "max(6, 4) + 1"
        assert outcome.lags == {1: 3}
        slow = replace(machines, train_s=lambda tokens: 9.0)
        assert simulate(slow, rows, Mode("one-step"), updates=4, skip=1).seconds == 10.0
        assert simulate(machines, rows, Mode(), updates=2).seconds == 11.0

    def test_async_hides_a_straggler(self) -> None:
        """Two groups an update, one slow: one-step waits for it, async trains on others."""
        rows = Groups([[row(2)], [row(2)], [row(2)], [row(20)]])
        two = Groups([rows.each[0], rows.each[3]])
        machines = system(EVEN, train_s=lambda tokens: 1.0)
        barrier = simulate(machines, two, Mode("one-step"), updates=8, skip=2)
        free = simulate(machines, two, Mode("async", max_lag=3), updates=8, skip=2)
        assert barrier.seconds == 20.0
        assert free.seconds < 10.0
        assert max(free.lags) == 3

    def test_a_learner_that_waits_for_its_rows(self) -> None:
        trainer = TrainerFigures(tokens_per_s=10.0, doubling=0.5, fixed_s=1.0)
        assert trainer.seconds(80, 20, 1) == 9.0
        assert trainer.seconds(80, 20, 4) == 1 + 20 / (10 * 0.25)
        assert trainer.seconds(80, 40, 4, passes=2) == 1 + 2 * 40 / 2.5, "the longest row"

    def test_what_cannot_be_simulated(self) -> None:
        rows = Groups([[row(1)]])
        with pytest.raises(UsageError, match="updates must be more than skip"):
            simulate(system(), rows, Mode(), updates=2, skip=2)
        with pytest.raises(UsageError, match="an engine"):
            simulate(system(engines=0), rows, Mode(), updates=1)
        with pytest.raises(UsageError, match="sync, one-step or async, not 'slow'"):
            Mode("slow")
        with pytest.raises(UsageError, match="max_lag"):
            Mode("async", -1)


row_draws = st.builds(
    row,
    st.integers(1, 30),
    k=st.integers(1, 6),
    waits=st.lists(st.floats(0, 20), max_size=4),
    verifier=st.floats(0, 3),
    prompt=st.integers(1, 9),
)
groups_of_rows = st.lists(st.lists(row_draws, min_size=2, max_size=2), min_size=1, max_size=5)
speeds = st.builds(
    lambda base, more, read, slots: Speed(((1, base), (8, base + more)), read, 0.01, 1e-4, slots),
    st.floats(0.05, 1),
    st.floats(0, 2),
    st.floats(0, 0.1),
    st.integers(1, 8),
)
judges = st.one_of(
    st.none(),
    st.builds(JudgeSystem, concurrent=st.integers(1, 4)),
    st.just(JudgeSystem(engine=EVEN, engines=2)),
    st.just(JudgeSystem(shared=True)),
)
modes = st.one_of(
    st.just(Mode()), st.just(Mode("one-step")), st.builds(Mode, st.just("async"), st.integers(0, 3))
)


class TestLaws:
    @LAWS
    @given(
        groups_of_rows, speeds, st.integers(1, 3), judges, modes, st.floats(0, 5), st.integers(1, 6)
    )
    def test_what_always_holds(
        self,
        groups: list[list[RowScript]],
        speed: Speed,
        engines: int,
        judge: JudgeSystem | None,
        mode: Mode,
        learning: float,
        in_flight: int,
    ) -> None:
        machines = system(
            speed, engines, judge=judge, train_s=lambda tokens: learning, sync_s=0.5,
            verifier_workers=2, in_flight=in_flight,
        )  # fmt: skip
        outcome = simulate(machines, Groups(groups), mode, updates=4)
        per_update = sum(map(len, groups))
        window = outcome.window
        assert len(outcome.rows) == 4 * per_update
        assert sum(outcome.lags.values()) == len(outcome.rows), "each row learns once"
        assert window.started == window.ended + outcome.alive
        assert window.ended >= len(outcome.rows) and not window.late
        wanted = {"sync": 0, "one-step": 1, "async": mode.max_lag}[mode.name]
        assert max(outcome.lags) <= wanted and min(outcome.lags) >= 0
        if mode.name == "sync":
            written = sum(r.sampled for r in outcome.rows)
            reviewed = sum(w.completion_tokens for r in outcome.rows for w in r.reviews)
            shared = reviewed if judge is not None and judge.shared else 0
            assert window.row_steps == written + shared, "every token is written once"
            assert outcome.alive == 0 and set(outcome.lags) == {0}
        most = window.at * (1 + 1e-9)
        assert 0 <= window.policy_busy <= engines * most
        assert 0 <= window.verifier_busy <= 2 * most
        assert window.train_s == pytest.approx(4 * learning) and window.train_s <= most
        places = judge.engines or judge.concurrent if judge is not None else 0
        assert 0 <= window.judge_busy <= places * most
        again = simulate(machines, Groups(groups), mode, updates=4)
        assert again == outcome, "the same again"

    @LAWS
    @given(
        st.lists(st.integers(1, 60), min_size=1, max_size=24), st.floats(0, 1), st.integers(1, 3)
    )
    def test_twice_the_engines_are_never_slower_without_reviews(
        self, lengths: list[int], slope: float, engines: int
    ) -> None:
        # Rows go to engines in turn, so that each of the doubled ones has a part of one's rows.
        # (Any other number, or rows that come back from reviews, may meet worse company.)
        rows = [row(length) for length in lengths]
        speed = Speed(((1, 1.0), (32, 1.0 + slope)))
        took = [seconds(rows, system(speed, engines * n)) for n in (1, 2, 4)]
        assert took[0] >= took[1] - 1e-9 and took[1] >= took[2] - 1e-9

    @LAWS
    @given(groups_of_rows, st.integers(0, 3), st.floats(0, 30))
    def test_a_window_that_skips_the_start_has_shares_too(
        self, groups: list[list[RowScript]], lag: int, learning: float
    ) -> None:
        machines = system(ONE, 2, judge=JudgeSystem(concurrent=2), train_s=lambda tokens: learning)
        outcome = simulate(machines, Groups(groups), Mode("async", lag), updates=6, skip=3)
        window = outcome.window
        for busy, places in ((window.policy_busy, 2), (window.judge_busy, 2)):
            assert -1e-6 <= busy <= places * window.at * (1 + 1e-9) + 1e-6
        assert len(outcome.rows) == 3 * sum(map(len, groups))


GOOD: dict[str, Any] = {
    "method": "mintrl-const",
    "policy": {"path": "some/Qwen3-1.7B", "max_prompt": 64},
    "tasks": {"path": "rows.jsonl"},
    "episode": {"chunk_tokens": 32, "max_response": 256},
    "rollout": {"n_control": 2, "n_intervened": 2},
    "judge": {"name": "llm", "options": {"limits": {"concurrent": 8}}, "concurrent": 16},
    "objective": {"intervention_updates": 20},
    "train": {"updates": 50, "prompts_per_update": 8, "micro_batch": 8},
}


def config(**changes: Any) -> RunConfig:
    data = {key: dict(v) if isinstance(v, dict) else v for key, v in GOOD.items()}
    for key, value in changes.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) else value
    return parse_config(data, "test")


FIGURES: dict[str, Any] = {
    "policy": {"tokens_per_s": {1: 100, 16: 800}, "slots": 64},
    "judge": {"latency_s": 1.0, "extra_tokens": 100, "tokens": 10,
              "prices": {"prompt": 1, "completion": 2}},
    "verifier": {"seconds": 0.01, "workers_per_gpu": 2},
    "trainer": {"tokens_per_s": 2000},
    "sync": {"seconds": 1.0},
    "rows": {"prompt_tokens": 50, "response_tokens": 100, "revise": 0.5,
             "kept": {"low": 0, "high": 1}, "correction_tokens": 10},
    "gpu_usd_per_hour": 2.0,
}  # fmt: skip


def figures(**changes: Any) -> Any:
    return gather(("given", FIGURES), ("test", changes))


class TestPlan:
    def test_figures_of_a_run(self) -> None:
        found = plan(config(), figures(), Wanted([4, 8]))
        first, second = found["runs"]
        assert found["judge_kind"] == "service"
        assert (first["gpus"], first["rows_per_update"]) == (4, 32)
        assert second["run"]["hours"] <= first["run"]["hours"] * 1.001
        run = first["run"]
        assert (run["judged_updates"], run["plain_updates"]) == (20, 30)
        assert run["hours"] == pytest.approx(run["judged_hours"] + run["plain_hours"])
        judged = first["judged"]
        assert run["judged_hours"] == pytest.approx(20 * judged["update_s"] / 3600)
        assert run["gpu_usd"] == pytest.approx(run["hours"] * 4 * 2.0)
        each = judged["per_update"]
        usd = each["judge_prompt_tokens"] / 1e6 + 2 * each["judge_completion_tokens"] / 1e6
        assert each["judge_usd"] == pytest.approx(usd)
        assert run["judge_usd"] == pytest.approx(20 * usd)
        assert run["judge_calls"] == run["reviews"] == round(20 * each["reviews"])
        assert first["plain"]["per_update"]["reviews"] == 0
        assert first["plain"]["idle"]["judge"] is None
        # Responses of exactly 100 tokens; plain rows write no more than that.
        assert first["plain"]["per_update"]["policy_tokens"] == 32 * 100
        assert first["plain"]["trajectories_per_s"] == pytest.approx(
            32 / first["plain"]["update_s"]
        )
        for phase in (judged, first["plain"]):
            shares = [share for share in phase["idle"].values() if share is not None]
            assert all(0 <= share <= 1 for share in shares)
            assert phase["update_s"] == pytest.approx(
                phase["rollout_s"] + phase["train_s"] + phase["sync_s"]
            )
            assert phase["lags"] == {"0": 1.0}

    def test_the_same_seed_gives_the_same_plan(self) -> None:
        varied = figures(rows={"response_tokens": {"median": 80, "p99": 250}})
        wanted = Wanted([4], Mode("async", 2), seed=3)
        first, again = plan(config(), varied, wanted), plan(config(), varied, wanted)
        assert first == again
        other = plan(config(), varied, replace(wanted, seed=4))
        assert other["runs"][0]["run"]["hours"] != first["runs"][0]["run"]["hours"]

    def test_a_slow_judge_moves_the_bottleneck(self) -> None:
        def bottleneck(**judge: Any) -> str:
            found = plan(config(), figures(judge=judge), Wanted([4], split="colocated"))
            return str(found["runs"][0]["judged"]["bottleneck"])

        assert bottleneck(latency_s=0.01) == "policy"
        assert bottleneck(latency_s=30.0) == "judge"
        assert bottleneck(latency_s=0.01, rpm=4) == "judge"
        slow = figures(trainer={"tokens_per_s": 5})
        runs = plan(config(), slow, Wanted([4]))["runs"]
        assert runs[0]["judged"]["bottleneck"] == "trainer"
        slow = figures(sync={"seconds": 500.0})
        assert plan(config(), slow, Wanted([4]))["runs"][0]["plain"]["bottleneck"] == "sync"
        slow = figures(verifier={"seconds": 60.0})
        assert plan(config(), slow, Wanted([4]))["runs"][0]["plain"]["bottleneck"] == "verifier"

    @pytest.mark.parametrize(
        ("mode", "most"), [(Mode(), 0), (Mode("one-step"), 1), (Mode("async", 3), 3)]
    )
    def test_lags_of_the_modes(self, mode: Mode, most: int) -> None:
        varied = figures(rows={"response_tokens": {"median": 80, "p99": 250}})
        judged = plan(config(), varied, Wanted([8], mode))["runs"][0]["judged"]
        assert judged["lag_max"] == most
        assert sum(judged["lags"].values()) == pytest.approx(1.0)
        assert (judged["rollout_s"] is None) == (mode.name == "async")

    def test_asynchronous_modes_are_faster(self) -> None:
        varied = figures(rows={"response_tokens": {"median": 80, "p99": 250}})
        hours = [
            plan(config(), varied, Wanted([8], mode, split="4:4"))["runs"][0]["run"]["hours"]
            for mode in (Mode(), Mode("one-step"), Mode("async", 4))
        ]
        assert hours[0] > hours[1] > hours[2]

    def test_prompts_that_grow_with_the_gpus(self) -> None:
        runs = plan(config(), figures(), Wanted([2, 8], scale_prompts=True))["runs"]
        assert [run["prompts_per_update"] for run in runs] == [8, 32]
        few = plan(config(), figures(), Wanted([64]))
        assert any("--scale-prompts" in note for note in few["notes"])

    def test_without_a_judge_there_is_one_phase(self) -> None:
        run = plan(config(method="grpo"), figures(), Wanted([4]))["runs"][0]
        assert run["judged"] is None
        assert (run["run"]["plain_updates"], run["run"]["judge_calls"]) == (50, 0)
        always = plan(config(objective={"intervention_updates": -1}), figures(), Wanted([4]))
        assert always["runs"][0]["plain"] is None

    def test_a_judge_on_gpus_of_its_own(self) -> None:
        own = figures(judge={"kind": "own", "engine": {"tokens_per_s": {1: 50, 64: 1600}}})
        run = plan(config(), own, Wanted([8], split="4:3:1"))["runs"][0]
        split = run["split"]
        assert (split["train"], split["policy"], split["judge"]) == (4, 3, 1)
        assert 0 <= run["judged"]["idle"]["judge"] <= 1
        assert run["run"]["judge_calls"] == 0 and run["run"]["reviews"] > 0
        assert run["run"]["judge_usd"] is None, "its GPUs are paid by the hour"

    def test_late_rows_are_told(self) -> None:
        found = plan(config(rollout={"deadline_s": 0.5}), figures(), Wanted([4]))
        assert any("rollout.deadline_s" in note for note in found["notes"])
        assert found["runs"][0]["judged"]["late_share"] > 0.5

    def test_a_budget_that_is_too_small_is_told(self) -> None:
        tight = config(judge={"name": "llm", "options": {"limits": {"usd": 0.01, "tokens": 5}}})
        notes = "\n".join(plan(tight, figures(), Wanted([4]))["notes"])
        assert "limits.usd" in notes and "limits.tokens" in notes

    def test_scores_at_once_are_bounded_by_machines_and_by_processes(self) -> None:
        slow = figures(verifier={"seconds": 10.0, "workers_per_gpu": 2})
        wanted = Wanted([4], split="colocated")
        # 32 rows end at one time: 2 workers a GPU take 4 turns; one a process (and GPU) takes 8.
        for most, workers, turns in ((16, 8, 4), (1, 4, 8)):
            run = config(rollout={"verifier_concurrent": most})
            planned = Planned(run, slow.figures, wanted, 4)
            (split,) = parse("colocated", 4, planned.needs(), sync=True)
            assert planned.workers(split) == workers
            plain = plan(run, slow, wanted)["runs"][0]["plain"]
            # 100 steps of 8 rows on each engine, between 10 ms for 1 and 20 ms for 16.
            writing = 100 * (0.01 + 0.01 * 7 / 15)
            assert plain["rollout_s"] == pytest.approx(10 * turns + writing, abs=0.01)
        run = config(rollout={"verifier_concurrent": 1})
        (split,) = parse("1:3", 4, Needs(1, 0, 1), sync=True)
        assert Planned(run, slow.figures, wanted, 4).workers(split) == 1, "one process trains"

    def test_the_rules_are_those_of_the_run(self) -> None:
        run = config(episode={"step_delimiters": [";"], "spacing": 7, "max_correction": 5})
        batches = Planned(run, figures().figures, Wanted([4]), 4).batches
        assert batches[True].rules == batches[False].rules == EpisodeConfig(
            chunk_tokens=32, max_response=256, step_delimiters=(";",), spacing=7, max_correction=5
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("name", "kind"), [("llm", "service"), ("self", "shared"), ("oracle", "instant")]
    )
    def test_what_kind_of_judge_it_is(self, name: str, kind: str) -> None:
        changed = config(judge={"name": name})
        assert judge_kind(changed, figures().figures) == kind
        said = figures(judge={"kind": "instant"}).figures
        assert judge_kind(changed, said) == "instant"
        assert plan(changed, figures(), Wanted([4]))["runs"][0]["judged"]["update_s"] > 0

    def test_limits_are_the_judges_unless_the_figures_say_otherwise(self) -> None:
        limited = config(
            judge={
                "options": {
                    "limits": {"concurrent": 4, "rpm": 30},
                    "prices": {"prompt": 3, "completion": 9},
                }
            }
        )
        bare = figures(judge={"prices": None}).figures.judge
        limits, prices = judge_limits(limited, bare)
        assert (limits.concurrent, limits.rpm, limits.tpm) == (4, 30, None)
        assert prices is not None and prices.usd(10**6, 10**6) == 12.0
        said = figures(judge={"concurrent": 99, "tpm": 1000}).figures.judge
        limits, prices = judge_limits(limited, said)
        assert (limits.concurrent, limits.rpm, limits.tpm) == (99, 30, 1000)
        assert prices is not None and prices.usd(10**6, 10**6) == 3.0
        assert judge_limits(config(judge={"options": {}}), bare)[0].concurrent == 16
        wrong = config(judge={"options": {"limits": {"rps": 3}}})
        with pytest.raises(ConfigError, match=r"judge\.options\.limits"):
            judge_limits(wrong, bare)


class TestSplit:
    needs = Needs(policy=1, judge=0, trainer=1)

    def test_ratios(self) -> None:
        (split,) = parse("4:3:1", 64, Needs(1, 1, 1), sync=True)
        assert (split.train, split.policy, split.judge, split.colocated) == (32, 24, 8, False)
        (split,) = parse("1:1", 10, Needs(4, 0, 1), sync=False)
        assert (split.train, split.policy, split.engines) == (6, 4, 1), "whole engines"

    def test_colocated_is_all_for_both(self) -> None:
        (split,) = parse("colocated", 8, self.needs, sync=True)
        assert (split.train, split.policy, split.engines, split.gpus) == (8, 8, 8, 8)
        with pytest.raises(UsageError, match="--mode sync"):
            parse("colocated", 8, self.needs, sync=False)

    def test_candidates_use_all_gpus_and_fit(self) -> None:
        for gpus in (2, 8, 64, 512):
            for split in candidates(gpus, Needs(2, 1, 1), sync=True):
                assert split.gpus <= gpus and split.engines == split.policy // 2 >= 1
                assert split.judge >= 1 and split.train >= 1
        assert [s.colocated for s in candidates(1, self.needs, sync=True)] == [True]
        assert candidates(1, self.needs, sync=False) == []

    @pytest.mark.parametrize(
        ("text", "needs", "message"),
        [
            ("3", Needs(1, 0, 1), "TRAIN:POLICY"),
            ("4:3:1", Needs(1, 0, 1), "this judge has no GPUs"),
            ("4:4", Needs(1, 1, 1), "TRAIN:POLICY:JUDGE"),
            ("0:4", Needs(1, 0, 1), "each >= 1"),
            ("auto", Needs(1, 0, 9), "9 for the trainer"),
            ("1:1", Needs(8, 0, 1), "8 for an engine"),
        ],
    )
    def test_splits_that_are_none(self, text: str, needs: Needs, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            parse(text, 8, needs, sync=True)


class TestFigures:
    def test_later_ones_go_before_and_say_so(self) -> None:
        sourced = gather(
            ("a preset", FIGURES),
            ("measured (x)", {"rows": {"revise": 0.1}}),
            ("a file", {"rows": {"revise": 0.2}, "gpu_usd_per_hour": 5}),
        )
        assert (sourced.figures.rows.revise, sourced.figures.gpu_usd_per_hour) == (0.2, 5.0)
        assert sourced.sources["rows.revise"] == "a file"
        assert sourced.sources["rows.kept"] == "a preset"

    def test_all_problems_are_told_with_their_source(self) -> None:
        wrong = {
            "rows": {"revise": 2, "kept": {"low": 1}},
            "policy": {"tokens_per_s": {1: 10, 8: 1000}, "speed": 3},
        }
        with pytest.raises(ConfigError) as caught:
            gather(("given", FIGURES), ("mine.yaml", wrong))
        text = str(caught.value)
        for part in (
            "rows.revise",
            "rows.kept",
            "policy.tokens_per_s",
            "policy.speed: no such key",
        ):
            assert part in text
        assert "(mine.yaml)" in text and "may not fall" in text

    def test_files_of_numbers(self, tmp_path: Path) -> None:
        (tmp_path / "latencies.txt").write_text("1.5\n2.5, 4\n")
        file = tmp_path / "mine.yaml"
        file.write_text("judge: {latency_s: {file: latencies.txt}}\n")
        sourced = gather(("given", FIGURES), ("mine", read_figures(file)))
        drawn = sourced.figures.habits().latency_s
        assert drawn.values == (1.5, 2.5, 4.0)
        (tmp_path / "latencies.txt").write_text("1.5\nslow\n")
        with pytest.raises(ConfigError, match=r"latencies\.txt:2: 'slow' is no number"):
            read_figures(file)
        (tmp_path / "latencies.txt").write_text("\n")
        with pytest.raises(ConfigError, match="no numbers"):
            read_figures(file)
        file.write_text("judge: {latency_s: {file: nowhere.txt}}\n")
        with pytest.raises(ConfigError, match="cannot be read"):
            read_figures(file)

    @pytest.mark.parametrize("name", [f"{m}@{g}" for m in MODELS for g in GPUS])
    def test_every_preset_is_whole(self, name: str) -> None:
        made = preset(name, max_prompt=2048, max_response=16384)
        found = gather(("given", made)).figures
        speed = found.policy.speed()
        assert 0 < speed.step(1) <= speed.step(256)
        assert found.judge.engine is not None and found.policy.slots >= 1

    def test_a_preset_by_hand(self) -> None:
        made = preset("qwen3-1.7b@h100", max_prompt=2048, max_response=1000)
        # 1,720,574,976 parameters: 3.44 GB of weights at 0.6 * 3.35 TB/s, and 3 ms.
        step = 3e-3 + 2 * 1_720_574_976 / (0.6 * 3.35e12)
        assert made["policy"]["tokens_per_s"][1] == pytest.approx(1 / step, rel=1e-3)
        # KV of a token: 2 * 28 layers * 8 heads * 128 * 2 bytes.
        assert made["policy"]["context_s"] == pytest.approx(114688 / (0.6 * 3.35e12))
        assert made["trainer"]["tokens_per_s"] == round(0.35 * 989e12 / (8 * 1_720_574_976))
        assert made["sync"]["seconds"] == pytest.approx(1 + 2 * 1_720_574_976 / 10e9)
        assert made["rows"]["response_tokens"] == {"median": 200.0, "p99": 1000}

    def test_a_presets_memory_is_that_of_mintrl_memory(self) -> None:
        def made(name: str, **changes: Any) -> dict[str, Any]:
            return preset(name, **{"max_prompt": 2048, "max_response": 30_000, **changes})

        gib = 2**30
        # A row of 200 + 15,000 tokens; 0.9 of the card less bf16 weights and 2 GiB.
        for model, p, token in (("4b", 4_022_468_096, 147_456), ("8b", 8_190_735_360, 147_456)):
            for gpu, size in (("h100", 80), ("h200", 141)):
                room = int(0.9 * size * gib) - 2 * p - 2 * gib
                slots = made(f"qwen3-{model}@{gpu}")["policy"]["slots"]
                assert slots == int(room / (token * 15_200)), (model, gpu)
        # 16 bytes a parameter alone: 26, 60, 122 GiB, and a row of 32,048 tokens besides.
        least = {
            (model, gpu): made(f"qwen3-{model}@{gpu}")["trainer"]["min_gpus"]
            for model in ("1.7b", "4b", "8b") for gpu in ("h100", "h200")
        }  # fmt: skip
        assert least == {
            ("1.7b", "h100"): 1, ("1.7b", "h200"): 1, ("4b", "h100"): 2, ("4b", "h200"): 1,
            ("8b", "h100"): 3, ("8b", "h200"): 2,
        }  # fmt: skip
        assert made("qwen3-8b@h100", lora=16)["trainer"]["min_gpus"] == 1
        with pytest.raises(UsageError, match="a row of 302,048 tokens has no room"):
            made("qwen3-8b@h100", max_response=300_000)

    def test_presets_are_found_by_name(self) -> None:
        assert preset_for("Qwen/Qwen3-4B-Instruct") == "qwen3-4b@h100"
        assert preset_for("warmup:student") == "qwen3-1.7b@h100"
        with pytest.raises(UsageError, match="did you mean h100"):
            preset("qwen3-4b@h10", max_prompt=1, max_response=1)
        with pytest.raises(UsageError, match="no model 'x'"):
            preset("x@h100", max_prompt=1, max_response=1)


def stored(rollout: int, kind: Kind, length: int, **changes: Any) -> Trajectory:
    ids = np.ones(length, dtype=np.int32)
    return replace(
        Trajectory(
            "t", 0, rollout, kind, np.ones(7, dtype=np.int32), ids,
            np.zeros(length, dtype=np.int8), np.zeros(length, dtype=np.float32), ids,
            Score(1.0, "correct"), True, StopReason.EOS,
        ),
        **changes,
    )  # fmt: skip


def stored_rows() -> list[Trajectory]:
    usage = Usage(prompt_tokens=100, completion_tokens=8, seconds=1.5, calls=2)
    reviews = (
        Review(0, 0, 10, Outcome.REVISE, 0, 4, 3, usage=usage),
        Review(1, 7, 10, Outcome.KEEP, usage=replace(usage, prompt_tokens=50, seconds=0.5)),
    )
    return [
        stored(0, Kind.CONTROL, 30),
        stored(1, Kind.INTERVENED, 20, reviews=reviews),
        stored(2, Kind.CONTROL, 1, stop_reason=StopReason.ERROR, valid=False),
    ]


class TestMeasured:
    def test_figures_of_rows_by_hand(self) -> None:
        found = of_rows(stored_rows())
        assert found["rows"] == {
            "prompt_tokens": {"values": [7.0, 7.0]},
            "response_tokens": {"values": [30.0, 20.0]},
            "revise": 0.5,
            "kept": {"values": [0.4]},
            "correction_tokens": {"values": [3.0]},
        }
        # 100 - 7 - 0 - 10 and 50 - 7 - 7 - 10.
        assert found["judge"] == {
            "calls": 2.0,
            "extra_tokens": (83 + 26) / 2,
            "tokens": {"values": [8.0, 8.0]},
            "latency_s": {"values": [1.5, 0.5]},
        }
        assert of_rows([]) == {}

    def test_a_runs_folder(self, tmp_path: Path) -> None:
        RolloutStore(tmp_path / "rollouts").write_group(stored_rows())
        sourced = gather_figures(config(), name=None, runs=[tmp_path], file=None)
        assert sourced.figures.rows.revise == 0.5
        assert sourced.sources["rows.revise"] == f"measured ({tmp_path})"
        assert sourced.sources["policy.slots"].startswith("given, not measured (preset qwen3-1.7b")
        assert plan(config(), sourced, Wanted([4]))["figures"]["judge"]["latency_s"] == {
            "measured": 2, "p5": pytest.approx(0.55), "p50": 1.0, "p95": pytest.approx(1.45)
        }  # fmt: skip

    def test_a_preflights_record(self, tmp_path: Path) -> None:
        record = {
            "rows": {"response_tokens_p50": 40.0, "response_tokens_p95": 90.0},
            "reviews": {"reviews": 10, "revise": 3},
            "all_reviews": [{"seconds": 2.0}, {"seconds": None}, {"seconds": 4.0}],
            "forecast": {"per_reviewed_row": {"reviews": 2.0, "calls": 4.0}},
        }
        path = tmp_path / "preflight.json"
        path.write_text(json.dumps(record))
        assert (
            measured(tmp_path)
            == measured(path)
            == {
                "rows": {"response_tokens": {"median": 40.0, "p95": 90.0}, "revise": 0.3},
                "judge": {"calls": 2.0, "latency_s": {"values": [2.0, 4.0]}},
            }
        )
        path.write_text("{}")
        with pytest.raises(ConfigError, match="no preflight's record"):
            measured(path)

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="nothing measured here"):
            measured(tmp_path)
        assert list(tmp_path.iterdir()) == [], "and nothing was made"


class TestCommand:
    def run(self, tmp_path: Path, *arguments: str, **changes: Any) -> Any:
        import yaml

        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({**GOOD, **changes}))
        mine = tmp_path / "figures.yaml"
        mine.write_text(yaml.safe_dump(FIGURES))
        return CliRunner().invoke(
            app, ["plan", str(path), "--figures", str(mine), *arguments], env={"COLUMNS": "120"}
        )

    def test_a_table_and_a_file(self, tmp_path: Path) -> None:
        out = tmp_path / "plan.json"
        result = self.run(tmp_path, "--gpus", "4,8", "--json", str(out))
        assert result.exit_code == 0, result.output
        for text in ("Plan, sync", "trajectories/s", "idle: policy", "bottleneck", "judge USD"):
            assert text in result.output
        assert "given, not measured (preset qwen3-1.7b@h100)" in result.output
        found = json.loads(out.read_text())
        assert [run["gpus"] for run in found["runs"]] == [4, 8]
        assert found["sources"]["rows.revise"] == f"given ({tmp_path / 'figures.yaml'})"

    def test_an_asynchronous_plan(self, tmp_path: Path) -> None:
        out = tmp_path / "plan.json"
        options = ("--gpus", "4", "--mode", "async", "--max-lag", "2", "--split", "1:3")
        result = self.run(tmp_path, *options, "--json", str(out), "--set", "train.updates=30")
        assert result.exit_code == 0, result.output
        found = json.loads(out.read_text())
        assert (found["mode"], found["max_lag"]) == ("async", 2)
        assert found["runs"][0]["split"]["policy"] == 3
        assert found["runs"][0]["run"]["plain_updates"] == 10
        assert "lag <= 2" in result.output

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--gpus", "8;64"), "numbers with commas"),
            (("--gpus", "0"), "counts >= 1"),
            (("--mode", "fast"), "sync, one-step or async"),
            (("--max-lag", "2"), "--mode async"),
            (("--split", "half"), "TRAIN:POLICY"),
            (("--preset", "qwen3-4b"), "MODEL@GPU"),
            (("--gpus", "1", "--mode", "one-step"), "too few"),
            (("--measured", "nowhere"), "nothing measured here"),
            (("--set", "train.upates=3"), "did you mean updates"),
        ],
    )
    def test_mistakes_are_named(
        self, tmp_path: Path, arguments: tuple[str, ...], message: str
    ) -> None:
        result = self.run(tmp_path, *arguments)
        assert isinstance(result.exception, (UsageError, ConfigError))
        assert message in str(result.exception)

    def test_the_table_has_a_column_for_each_count(self) -> None:
        table = plan_table(plan(config(), figures(), Wanted([2, 4, 8])))
        assert [str(column.header) for column in table.columns] == ["GPUs", "2", "4", "8"]

    def test_shipped_recipes_can_be_planned(self) -> None:
        from mintrl_env.config import load_config

        folder = Path(__file__).parents[1] / "configs"
        whole = [p for p in sorted(folder.glob("*.yaml")) if "method:" in p.read_text()]
        assert len(whole) >= 3
        for path in whole:
            loaded = load_config(path, ["train.prompts_per_update=4", "train.micro_batch=1"])
            sourced = gather_figures(loaded, name=None, runs=[], file=None)
            found = plan(loaded, sourced, Wanted([8], updates=1))
            assert math.isfinite(found["runs"][0]["run"]["hours"])


class TestPage:
    page = Path(__file__).parents[1] / "docs" / "planning.md"

    def test_its_figures_are_figures_and_name_every_key(self) -> None:
        import yaml

        from mintrl_env.plan_figures import Figures

        block = self.page.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
        data = yaml.safe_load(block)
        found = gather(("the page", data)).figures
        assert found.policy.speed().step(64) == pytest.approx(64 / 9000)
        for section, field in Figures.model_fields.items():
            keys = getattr(field.annotation, "model_fields", {})
            assert not keys or set(keys) == set(data[section]), section
