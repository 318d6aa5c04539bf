"""The characters that byte-level vocabularies use for bytes (the GPT-2 alphabet)."""


def _letters() -> tuple[str, ...]:
    """Return the character of each byte: printable bytes map to themselves, the others to U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


BYTE_LETTERS = _letters()
"""Character by byte value."""
BYTE_OF_LETTER = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}
