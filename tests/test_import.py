"""A light import, pinned public names, and imports that run one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest

import mintrl_env

ROOT = Path(mintrl_env.__file__).resolve().parent.parent
PACKAGE = ROOT / "mintrl_env"
LAYERS = ("core", "verifiers", "trainers", "adapters")
HEAVY = {
    "accelerate", "datasets", "e2b", "httpx", "math_verify", "matplotlib", "openai", "peft",
    "pandas", "pyarrow", "pydantic", "ray", "rich", "scipy", "sympy", "torch", "transformers",
    "trl", "typer", "verl", "vllm", "yaml",
}  # fmt: skip
# Recipes and CLI: the only modules that wire everything together. A new one is put here on purpose.
WIRING = {
    "calibrate", "cli", "cli_launch", "cli_options", "cli_plan", "cli_recipes", "cli_store", "cli_verl",
    "config", "console", "doctor", "doctor_sandboxes", "dry_run", "dry_run_config", "dry_run_tasks",
    "evaluation", "filter_tasks", "judge_recipes", "judging", "memory", "placement", "plan",
    "plan_command", "plan_figures", "plan_machines", "plan_measured", "plan_tables", "preflight",
    "preflight_gate", "preflight_servers", "quickstart", "recipes", "run_folder", "running",
    "served", "store_show", "store_source", "store_tables", "suite", "trainer_settings", "training",
    "training_log", "verl_command", "verl_entry", "verl_overrides",
}  # fmt: skip
PUBLIC = """
ByteTokenizer Chunk ConfigError Ended EnvironmentOutput Episode EpisodeConfig Finished Guard
GuardWrapper HFTokenizer InterventionBudget Judge JudgeCause JudgeEnv JudgeError JudgeIntervention
KeepJudge Kind LeakGuard MintrlError MissingExtraError NeedChunk NeedEnvironment NeedReview
NeedScore OracleJudge Outcome Parts Policy PolicyEnv PolicyError PolicyVectorEnv PromptBuilder
Provenance RecordTrajectories RegistryError Review ReviewRequest RolloutConfig RolloutStats
RolloutStore RowKey Runner Sampling Score Scorer SpecialTokenGuard StopReason StoreError Task
TaskColumns TaskError TokenIds Tokenizer ToolFailure Trajectory Turn UnicodeText UsageError Verdict
Verifier VerifierError load_tasks register
""".split()


class TestLight:
    def loaded(self, code: str) -> set[str]:
        program = f"{code}\nimport sys\nprint(' '.join(sys.modules))"
        run = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
        )
        return set(run.stdout.splitlines()[-1].split())

    def test_importing_loads_nothing_heavy_and_little_of_ours(self) -> None:
        modules = self.loaded("import mintrl_env")
        assert {name.partition(".")[0] for name in modules} & HEAVY == set()
        assert {name for name in modules if name.startswith("mintrl_env")} == {"mintrl_env"}

    def test_stepping_the_bare_environments_loads_nothing_heavy(self) -> None:
        modules = self.loaded(
            "import gymnasium, mintrl_env\n"
            "for name in ('MinTRL/Policy-v0', 'MinTRL/Judge-v0'):\n"
            "    env = gymnasium.make(name)\n"
            "    env.reset(seed=0)\n"
            "    env.step(env.action_space.sample())\n"
            "    env.close()\n"
            "gymnasium.make_vec('MinTRL/Policy-v0', num_envs=2, judge='keep').reset(seed=0)"
        )
        assert {name.partition(".")[0] for name in modules} & HEAVY == set()

    def test_every_core_module_imports_without_the_heavy_ones(self) -> None:
        names = [path.stem for layer, path in sources() if layer == "core"]
        modules = self.loaded("\n".join(f"import mintrl_env.{n}" for n in names if n[0] != "_"))
        assert {name.partition(".")[0] for name in modules} & HEAVY == set()

    def test_importing_again_neither_warns_nor_overrides(self) -> None:
        spec = gymnasium.spec("MinTRL/Policy-v0")
        mintrl_env.register_environments()
        assert gymnasium.spec("MinTRL/Policy-v0") is spec
        assert {name for name in gymnasium.registry if name.startswith("MinTRL/")} == {
            "MinTRL/Policy-v0",
            "MinTRL/Judge-v0",
        }


class TestPublicNames:
    def test_they_are_pinned(self) -> None:
        assert mintrl_env.__all__ == sorted(PUBLIC)
        assert mintrl_env.__version__ == "0.1.0"

    @pytest.mark.parametrize("name", PUBLIC)
    def test_each_is_there_and_documented(self, name: str) -> None:
        thing = getattr(mintrl_env, name)
        assert name in dir(mintrl_env)
        if name != "Guard":  # an alias, documented where it stands
            assert thing.__doc__, f"{name} has no docstring"

    def test_type_checkers_see_the_same_names_from_the_same_modules(self) -> None:
        tree = ast.parse((PACKAGE / "__init__.py").read_text())
        block = next(node for node in tree.body if isinstance(node, ast.If))
        seen = {
            alias.asname: f"{node.module}"
            for node in block.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        wanted = {name: f"mintrl_env.{module}" for name, module in mintrl_env._HOME.items()}
        assert seen == wanted

    def test_an_unknown_name(self) -> None:
        with pytest.raises(AttributeError, match="no attribute 'PolicyEnvv'"):
            _ = mintrl_env.PolicyEnvv


def sources() -> Iterator[tuple[str, Path]]:
    """Layer and file of every module."""
    for path in sorted(PACKAGE.glob("*.py")):
        if path.stem not in WIRING:
            yield "core", path
    for layer in LAYERS[1:]:
        for path in sorted((ROOT / layer).glob("*.py")):
            yield layer, path


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """The full names of the modules that a file imports, anywhere or when it is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes: Iterator[ast.AST] = iter(tree.body) if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}:{node.lineno}: imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(module: str) -> str | None:
    """The layer of one of our modules; None for other people's."""
    parts = module.split(".")
    if parts[0] != "mintrl_env":
        return None
    if len(parts) > 1 and parts[1] in LAYERS:
        return parts[1]
    return "wiring" if len(parts) > 1 and parts[1] in WIRING else "core"


class TestArrows:
    """core <- verifiers <- trainers <- adapters <- recipes and CLI, deferred imports included."""

    def test_the_walk_finds_the_modules(self) -> None:
        found = {(layer, path.stem) for layer, path in sources()}
        assert {("core", "episode"), ("verifiers", "math_answer")} <= found
        assert {("trainers", "objective"), ("adapters", "policy_transformers")} <= found

    @pytest.mark.parametrize(
        ("layer", "path"), [pytest.param(*s, id=f"{s[0]}/{s[1].stem}") for s in sources()]
    )
    def test_no_import_runs_against_them(self, layer: str, path: Path) -> None:
        allowed = LAYERS[: LAYERS.index(layer) + 1]
        for module in imports(path):
            target = layer_of(module)
            assert target is None or target in allowed, f"{path.name} imports {module}"

    @pytest.mark.parametrize(
        "path", [pytest.param(p, id=p.stem) for layer, p in sources() if layer == "core"]
    )
    def test_core_imports_nothing_heavy_at_its_top(self, path: Path) -> None:
        heavy = {m.partition(".")[0] for m in imports(path, top_level_only=True)} & HEAVY
        assert not heavy

    @pytest.mark.parametrize(
        "path", [pytest.param(p, id=f"{layer}/{p.stem}") for layer, p in sources()]
    )
    def test_no_bare_names_of_the_root_folders(self, path: Path) -> None:
        # PyPI has packages called `verifiers` and `adapters`.
        bare = {m.partition(".")[0] for m in imports(path)} & {*LAYERS[1:], "configs"}
        assert not bare

    def test_a_planted_arrow_is_caught(self, tmp_path: Path) -> None:
        planted = tmp_path / "planted.py"
        planted.write_text(
            "def f():\n    from mintrl_env import adapters\n    import mintrl_env.trainers.x\n"
        )
        targets = {layer_of(module) for module in imports(planted)}
        assert {"adapters", "trainers"} <= targets
