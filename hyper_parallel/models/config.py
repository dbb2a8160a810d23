"""The sizes of a decoder."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hyper_parallel.core.errors import ConfigError


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU (Qwen3's shape).

    `num_heads` query heads share `num_kv_heads` key and value heads; `head_dim` need not be
    `hidden_size / num_heads`. `initializer_range` is the standard deviation of initial matrices.
    Raises `ConfigError` that names every field with a value that can't be.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        wrong = [message for message in map(self._type_error, fields(self)) if message]
        if not wrong:
            wrong = self._combination_errors()
        if wrong:
            raise ConfigError("\n".join(wrong))

    def _type_error(self, field) -> str | None:
        """What is wrong with one field by itself."""
        value = getattr(self, field.name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if field.type == "int" and not (number and isinstance(value, int) and value > 0):
            return f"{field.name} must be a positive whole number, found {value!r}"
        if field.type == "float" and not (number and 0 < value < float("inf")):
            return f"{field.name} must be a positive number, found {value!r}"
        if field.type == "bool" and not isinstance(value, bool):
            return f"{field.name} must be true or false, found {value!r}"
        return None

    def _combination_errors(self) -> list[str]:
        """What is wrong with fields beside each other."""
        wrong = []
        if self.num_heads % self.num_kv_heads:
            wrong.append(
                f"num_heads must be a multiple of num_kv_heads, found {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            wrong.append(f"head_dim must be even (rotary positions turn pairs), found {self.head_dim}")
        return wrong
