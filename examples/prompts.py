"""What a demonstration shows: the example adapters and the prompts to ask them, none of which they were trained on."""

from pathlib import Path
from typing import NamedTuple

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ADAPTERS_FOLDER = Path(__file__).parent / "adapters"


class ExampleAdapter(NamedTuple):
    """One trained adapter: its folder under `ADAPTERS_FOLDER` and what it does to an answer."""

    name: str
    effect: str


ADAPTERS = (
    ExampleAdapter("pirate", "talks like a pirate"),
    ExampleAdapter("json", "answers with a JSON object: answer and topic"),
    ExampleAdapter("sentiment", "answers only positive, negative or neutral"),
)

PROMPTS = (
    "What is the capital of France?",
    "Why do birds sing?",
    "I loved this film!",
    "My train was late again and it was freezing.",
)

# The json adapter's answers to these must parse.
JSON_PROMPTS = (
    "What is the capital of France?",
    "Why do birds sing?",
    "I loved this film!",
    "Who wrote The Odyssey?",
    "What is 9 times 6?",
    "How do I clean a window?",
    "Why do birds sing?",
    "What is the capital of Canada?",
    "Tell me about horses.",
    "How can I learn to play the piano?",
)
