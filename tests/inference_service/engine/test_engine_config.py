"""How long a sequence may get, by what is asked for, the model and the KV cache; and what the log says of it."""

import pytest

from inference_service.engine.config import EngineConfig, limits_for, model_len_line


@pytest.mark.parametrize(
    ("wanted", "max_position", "kv_tokens", "length", "line", "is_cut"),
    [
        (None, 131072, 900_000, 8192, "a sequence may have 8192 tokens: as many as max_model_len allows", False),
        (None, 2048, 900_000, 2048, "a sequence may have 2048 tokens: as many as the model allows", False),
        (None, 131072, 512, 512, "a sequence may have 512 tokens: as many as the KV cache allows", False),
        (4096, 131072, 900_000, 4096, "a sequence may have 4096 tokens: as many as max_model_len allows", False),
        (2048, 2048, 2048, 2048, "a sequence may have 2048 tokens: as many as max_model_len allows", False),
        (
            32768, 2048, 900_000, 2048,
            "a sequence may have 2048 tokens instead of the 32768 of max_model_len: as many as the model allows", True,
        ),
        (
            32768, 131072, 20_000, 20_000,
            "a sequence may have 20000 tokens instead of the 32768 of max_model_len: as many as the KV cache allows",
            True,
        ),
    ],
)  # fmt: skip
def test_the_length_of_a_sequence_and_what_the_log_says_of_it(
    wanted: int | None, max_position: int, kv_tokens: int, length: int, line: str, is_cut: bool
) -> None:
    config = EngineConfig(model="any", max_model_len=wanted)
    assert limits_for(config, "cpu", max_position, kv_tokens).max_model_len == length
    assert model_len_line(config, max_position, kv_tokens) == (line, is_cut)
