"""`mintrl memory`: parameters as transformers counts them, bytes and calls as worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from mintrl_env.cli import app
from mintrl_env.config import RunConfig, load_config
from mintrl_env.episode import Episode, Finished, NeedChunk, NeedReview
from mintrl_env.errors import ConfigError
from mintrl_env.memory import HALVES, Stated, halves, measured_as_stated, reckon
from mintrl_env.memory_formula import GIB, REST, Training, fewest_gpus, kv_row, served
from mintrl_env.memory_shapes import Shape, known_shapes, shape_of
from mintrl_env.prompts import ByteTokenizer
from mintrl_env.recipes import episode_config
from mintrl_env.types import Chunk, Kind, Score, Task, Verdict

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
TINY = Shape("qwen3", 2, 8, 4, 2, 4, 16, 100, tied=True, qk_norm=True)


def config(name: str = "qwen3_1.7b_math", *overrides: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}.yaml", overrides)


@pytest.mark.parametrize("name", known_shapes())
def test_parameters_are_those_of_the_model_itself(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shape = shape_of(name)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(
                shape.model_type, vocab_size=shape.vocab, hidden_size=shape.hidden,
                intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
                head_dim=shape.head_dim, tie_word_embeddings=shape.tied,
            )
        )  # fmt: skip
    assert shape.parameters == sum(p.numel() for p in made.parameters())
    linear = [m for m in made.model.modules() if isinstance(m, torch.nn.Linear)]
    assert shape.linear_parameters == sum(m.weight.numel() for m in linear)
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        made, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    assert shape.lora_parameters(4) == sum(
        p.numel() for n, p in adapted.named_parameters() if "lora_" in n
    )


def test_known_sizes() -> None:
    shapes = known_shapes()
    assert {name: shape.parameters for name, shape in shapes.items()} == {
        "Qwen/Qwen3-0.6B": 596_049_920,
        "Qwen/Qwen3-1.7B": 1_720_574_976,
        "Qwen/Qwen3-4B": 4_022_468_096,
        "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
        "Qwen/Qwen3-8B": 8_190_735_360,
        "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    }
    # 2 x 28 layers x 8 heads x 128 x 2 bytes, of 18,432 tokens.
    assert kv_row(shapes["Qwen/Qwen3-1.7B"], 18_432) == 114_688 * 18_432


def test_the_shape_of_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from mintrl_env.dry_run_model import tiny_model

    assert shape_of(tiny_model(tmp_path, "llama", positions=64)) == Shape(
        "llama", 2, 32, 2, 1, 16, 64, 261, tied=True, qk_norm=False
    )
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 3}')
    with pytest.raises(ConfigError, match=r"config\.json: no 'num_attention_heads' in it"):
        shape_of(str(tmp_path))
    with pytest.raises(ConfigError, match="shape of 'A/b' is not known here"):
        shape_of("A/b")


def training(**changes: Any) -> Training:
    given: dict[str, Any] = dict(
        shape=TINY, bf16=False, lora=0, rows=2, length=10, checkpointing=True
    )
    return Training(**{**given, **changes})


def test_bytes_by_hand() -> None:
    # Attention 8 x 4 x (2 x 4 + 2 x 2) = 384, MLP 3 x 8 x 16 = 384: 2 x 768 linear weights; norms
    # 2 x (16 + 8) + 8; embedding 800.
    p, linear = 1536 + 48 + 8 + 800, 1536
    assert (TINY.parameters, TINY.linear_parameters, TINY.kv_values) == (p, linear, 2 * 2 * 2 * 4)
    layer = 4 * 4 * 8 + 2 * (3 * 16 + 3 * 8 + 4 * 16)  # a token, one layer, float32 residual
    head = 4 * 100 * 8 + 2 * 4 * 20 * 8 + 4096 * 8192 * 2
    run = training()
    assert run.state() == {"weights": 4 * p, "AdamW": 8 * p}
    assert run.step() == {
        "bf16 copies": 2 * linear, "gradients": 4 * p,
        "activations": 20 * (2 * 4 * 8 + 2 * layer), "log-probs": head,
    }  # fmt: skip
    assert training(checkpointing=False).step()["activations"] == 20 * 2 * layer
    assert training(gpus=4).step()["DDP buckets"] == 4 * p
    assert run.full_logits() == 2 * 4 * 20 * 100
    assert run.sharded(4) == (4 + 8 + 4) * p // 4 + linear + sum(
        run.step()[k] for k in ("activations", "log-probs")
    ) + REST  # fmt: skip
    half = training(bf16=True)
    assert half.state() == {"weights": 2 * p, "AdamW": 4 * p}
    assert half.step()["gradients"] == 2 * p and "bf16 copies" not in half.step()
    # An adapter of rank 1: q (8 + 16), k and v (8 + 8), o (16 + 8), three of the MLP (8 + 16).
    adapter = 2 * (24 + 2 * 16 + 24 + 3 * 24)
    lora = training(lora=1)
    assert lora.trained == adapter
    assert lora.state() == {"weights": 4 * p + 4 * adapter, "AdamW": 8 * adapter}
    assert lora.step()["gradients"] == 4 * adapter
    assert lora.step()["log-probs"] == head - 4 * 100 * 8


def test_a_server_keeps_what_its_weights_leave() -> None:
    assert served(TINY, REST + 2 * TINY.parameters + 5) == 5
    assert served(TINY, 10) == 0


def test_as_few_gpus_as_it_can_be_sharded_over() -> None:
    run = training(gpus=8)
    alone = sum(training().state().values()) + sum(training().step().values()) + REST
    assert training().whole() == alone
    assert fewest_gpus(run, alone) == 1
    assert run.sharded(2) < alone - 1, "or the next lines say nothing"
    assert fewest_gpus(run, alone - 1) == 2
    assert fewest_gpus(run, run.sharded(5)) == 5
    assert fewest_gpus(run, REST) is None


def test_the_engine_decides_what_stays_while_the_trainer_learns() -> None:
    stated = Stated(gpus=1, gpu_gib=80)
    asleep = reckon(config(), stated)
    awake = reckon(config("qwen3_1.7b_math", "rollout.engine_options={memory: 0.35}"), stated)
    assert awake["learning"] - asleep["learning"] == int(0.35 * 80 * GIB)
    own = reckon(
        config("qwen3_1.7b_math", "rollout.engine=transformers", "rollout.engine_options={}",
               "rollout.slots=4"), stated,
    )  # fmt: skip
    assert own["engine"]["while_learning"] == 4 * 114_688 * 18_432
    elsewhere = reckon(
        config("qwen3_1.7b_math", "rollout.engine=server",
               "rollout.engine_options={url: 'http://h:1/v1'}"), stated,
    )  # fmt: skip
    assert elsewhere["engine"]["while_learning"] == 0
    assert elsewhere["peak"] == elsewhere["learning"] == asleep["learning"]
    assert asleep["peak"] == max(asleep["learning"], asleep["engine"]["while_writing"])


def test_a_self_judge_takes_its_place_beside_the_policy() -> None:
    stated = Stated(gpu_gib=141)
    full = reckon(config("qwen3_4b_self"), stated)
    p = known_shapes()["Qwen/Qwen3-4B"].parameters
    # 4 reviews at once, three prompts each: problem, reference, and 4 x (512 + 64) tokens twice over.
    kv = 12 * (2 * (2048 + 4 * 576) + 512) * 2 * 73_728
    assert full["state"]["self-judge"] == 4 * p
    assert full["state"]["self-judge's KV"] == kv
    other = reckon(config("qwen3_4b_self", "judge=judge_qwen3_4b.yaml"), stated)
    # The other one is a server on the same GPU, in a fifth of it.
    assert full["learning"] - other["learning"] == 4 * p + kv - int(0.2 * 141 * GIB)
    lora = reckon(config("qwen3_4b_self", "policy.lora={r: 16}"), stated)
    assert "self-judge" not in lora["state"] and lora["state"]["self-judge's KV"] == kv


def test_calls_and_tokens_by_hand() -> None:
    stated = Stated(response=1024, revise=0.5, evaluation=30)
    run = config()
    measured = measured_as_stated(run, stated)
    # Two chunks of 512: 2 reviews, half of them followed by a correction.
    assert (measured.reviewed_rows, measured.reviews, measured.usage.calls) == (1000, 2000, 3000)
    read = (700 + 250 + 512) + (700 + 250 + 1024) + 0.5 * ((350 + 250) + (350 + 250 + 512))
    assert measured.usage.prompt_tokens == 1000 * read
    assert measured.usage.completion_tokens == 1000 * 2 * (120 + 0.5 * 64)
    # A Revise drops half a chunk, and writes 64 tokens for the policy.
    assert measured.sampled_reviewed == 1000 * (1024 + 256 - 64)
    found = reckon(run, stated)
    assert (found["rows"], found["reviewed_rows"]) == (500 * 512 + 12 * 30 * 8, 200 * 32 * 8)
    assert (found["reviews"], found["calls"]) == (51_200 * 2, 51_200 * 3)
    assert found["prompt_tokens"] == 51_200 * read
    assert found["learnt_tokens"] == 500 * 512 * (1024 + 250)
    other = found["rows"] - 51_200
    assert found["policy_tokens"] == 51_200 * (1024 + 256 - 64) + other * 1024


@pytest.mark.parametrize("spacing", [0, 3, 11])
@pytest.mark.parametrize("response", [1, 7, 8, 9, 19, 20, 38, 40])
def test_reviews_are_those_that_the_rules_make(response: int, spacing: int) -> None:
    """Against the real Episode: a response of this length, every review a Keep."""
    run = config(
        "qwen3_1.7b_math", "episode.chunk_tokens=8", "episode.max_reviews=3",
        "episode.max_response=40", f"episode.spacing={spacing}",
    )  # fmt: skip
    tokenizer = ByteTokenizer()
    (eos,) = tokenizer.eos_ids
    episode = Episode(
        Task("t", "?"), [1], kind=Kind.INTERVENED, tokenizer=tokenizer, config=episode_config(run)
    )
    while not isinstance(need := episode.need, Finished):
        if isinstance(need, NeedChunk):
            ids = [ord("x")] * min(need.max_tokens, response - len(episode))
            if len(episode) + len(ids) == response:
                ids[-1] = eos
            episode.send(Chunk(ids, np.zeros(len(ids), np.float32)))
        elif isinstance(need, NeedReview):
            episode.send(Verdict.keep())
        else:
            episode.send(Score(1.0, "correct"))
    assert len(episode) == response
    measured = measured_as_stated(run, Stated(response=response, revise=0.0))
    assert measured.reviews == measured.usage.calls == 1000 * len(episode.reviews)
    assert measured.usage.prompt_tokens == 1000 * sum(
        700 + 250 + review.position + 8 for review in episode.reviews
    )


def test_a_bare_cut_is_one_call_and_writes_no_correction() -> None:
    stated = Stated(response=1024, revise=0.5)
    measured = measured_as_stated(config("qwen3_1.7b_math", "judge.options.mode=cut-only"), stated)
    assert (measured.reviews, measured.usage.calls) == (2000, 2000)
    assert measured.usage.prompt_tokens == 1000 * (2 * 950 + 512 + 1024)
    assert measured.usage.completion_tokens == 1000 * 2 * 120
    # Half a chunk of each Revise is dropped, and the policy writes all of the response itself.
    assert measured.sampled_reviewed == 1000 * (1024 + 256)
    once = measured_as_stated(config("qwen3_1.7b_math", "judge.options.mode=one-call"), stated)
    assert once.usage.calls == 2000
    assert once.usage.completion_tokens == 1000 * 2 * (120 + 0.5 * 64)


def test_a_judge_on_the_only_gpu_takes_its_part_of_it() -> None:
    local = reckon(config(), Stated(gpu_gib=80))
    assert local["state"]["judge's server"] == int(0.2 * 80 * GIB)
    remote = reckon(
        config("qwen3_1.7b_math", "judge.options.url=https://api.example.com/v1"),
        Stated(gpu_gib=80),
    )
    assert "judge's server" not in remote["state"]
    for what in ("peak", "learning"):
        assert local[what] - remote[what] == int(0.2 * 80 * GIB)
    for other, gpus in (((), 2), (("method=grpo",), 1)):
        found = reckon(config("qwen3_1.7b_math", *other), Stated(gpus=gpus, gpu_gib=80))
        assert "judge's server" not in found["state"]


def test_of_several_gpus_the_engine_is_on_others() -> None:
    found = reckon(config(), Stated(gpus=4, gpu_gib=80))
    p = known_shapes()["Qwen/Qwen3-1.7B"].parameters
    assert found["engine"]["kind"] == "server" and found["peak"] == found["learning"]
    assert found["engine"]["while_writing"] == 12 * p + REST
    assert found["engine"]["rows"] == (int(0.9 * 80 * GIB) - 2 * p - REST) / (114_688 * 18_432)


def test_who_asks_no_server_calls_none() -> None:
    stated = Stated()
    assert reckon(config("qwen3_1.7b_math", "method=grpo"), stated)["calls"] == 0
    own = reckon(config("qwen3_4b_self"), stated)
    assert own["calls"] == 0 and own["reviews"] == 51_200 * 4 and own["judge_gpu"] is None
    once = reckon(config("qwen3_1.7b_math", "judge.options.mode=one-call"), stated)
    assert once["calls"] == once["reviews"] == 51_200 * 4


def test_hours_follow_from_what_is_stated() -> None:
    assert reckon(config(), Stated())["hours"] is None
    found = reckon(config(), Stated(gpus=4, write=1000, learn=2000))
    hours = found["hours"]
    assert hours["writing"] == pytest.approx(found["policy_tokens"] / 4000 / 3600)
    assert hours["learning"] == pytest.approx(found["learnt_tokens"] / 8000 / 3600)
    assert hours["all"] == hours["writing"] + hours["learning"]


def test_each_half_saves_something() -> None:
    stated = Stated(gpus=8, write=4000, learn=9000)
    before = reckon(config(), stated)
    found = dict(halves(config(), stated))
    assert len(found) == len(HALVES)
    updates = found["train.updates=250"]
    # The judge's 200 updates stay, and evaluations are fewer.
    assert (
        updates["calls"] == before["calls"]
        and updates["hours"]["all"] < 0.51 * before["hours"]["all"]
    )
    assert found["train.prompts_per_update=16"]["calls"] * 2 == before["calls"]
    shorter = found["episode.max_response=8192"]
    assert shorter["hours"]["all"] < 0.56 * before["hours"]["all"]
    for name in ("policy.lora={r: 16}", "policy.dtype=bfloat16", "train.micro_batch=1"):
        assert found[name]["learning"] < before["learning"], name
    lora = config("qwen3_1.7b_math", "policy.lora={r: 8}", "train.micro_batch=1")
    assert {"policy.lora={r: 16}", "train.micro_batch=1"}.isdisjoint(dict(halves(lora, stated)))


def test_the_command_prints_it_all() -> None:
    command = ["memory", str(CONFIGS / "qwen3_4b_math.yaml"), "--gpus", "8"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    for text in ("By formula, nothing measured", "does not fit", "judge calls", "276,480",
                 "say how fast", "train.updates=250", "KV cache: 2.5 GiB a row"):  # fmt: skip
        assert text in done.output, text
    done = CliRunner().invoke(
        app, [*command, "--gpu-gib", "141", "--write", "2000", "--learn", "4000"]
    )
    assert ": fits" in done.output and "writing" in done.output
    done = CliRunner().invoke(app, ["memory", str(CONFIGS / "quickstart_grpo.yaml")])
    assert isinstance(done.exception, ConfigError)
