"""The ids that end a response of a model that this process does not load."""

from __future__ import annotations

from mintrl_env.errors import ConfigError


def model_ends(path: str) -> list[int]:
    """Those of generation_config.json, else of config.json, as a loaded model has them.

    Raises:
        ConfigError: neither can be read.
    """
    from transformers import AutoConfig, GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        try:
            ends = getattr(AutoConfig.from_pretrained(path), "eos_token_id", None)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"policy.path: {path!r}: neither generation_config.json nor config.json can be read: "
                f"{error}"
            ) from error
    if ends is None:
        return []
    return [int(i) for i in ends] if isinstance(ends, (list, tuple)) else [int(ends)]
