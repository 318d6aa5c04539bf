"""Real prompts of mixed lengths, some as chats, some sharing a long beginning."""

_LETTER = (
    "The lighthouse keeper wrote one letter a month to his sister, who lived inland and had never seen the sea. In it "
    "he described the weather, the ships that passed, and the birds that came to rest on the gallery when the wind "
    "was too strong for them. In winter the supply boat could not land for weeks, and he learned to bake bread from "
    "flour that had grown damp, to mend the lamp's clockwork with wire from a broken fence, and to read the same six "
    "books as if each time someone else had written them. She answered every letter on the day it came. She told him "
    "about the market, about the neighbour's dog that stole bread, and about their mother's garden, where the old "
    "pear tree had been struck by lightning and had, against all advice, grown leaves again. "
)
_LOG = "\n".join(
    f"2024-03-{day:02d} {hour:02d}:15 station {day % 7} temperature {11 + (day * hour) % 9} humidity {40 + hour}"
    for day in range(1, 4)
    for hour in (6, 14, 22)
)

TEXTS: tuple[str, ...] = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Photosynthesis is the process by which",
    "To make bread you need flour,",
    "Der schnelle braune Fuchs",
    "SELECT name, age FROM users WHERE",
    "A haiku about autumn:\n",
    "import numpy as np\n\n\ndef moving_average(values, width):\n",
    "If all cats are animals and Tom is a cat, then",
    "Hello",
    _LETTER + "The last letter that he sent her said that",
    _LETTER + "Many years later, when the lighthouse had become a museum, a visitor asked",
    _LETTER + _LETTER + "What the keeper never told his sister was",
    "Weather log of the northern stations:\n" + _LOG + "\n2024-03-04 06:15 station",
)
CHATS: tuple[str, ...] = (
    "What is the capital of Japan?",
    "Why is the sky blue? Answer in two sentences.",
    "Write a short poem about a paper boat.",
    "Name three fruits that are red.",
    "Summarise this in one sentence: " + _LETTER,
)
