"""The letters with which byte-level vocabularies write bytes (the GPT-2 alphabet)."""


def _letters() -> tuple[str, ...]:
    """Printable bytes stand for themselves, the others for letters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


BYTE_LETTERS = _letters()
"""The letter of each byte."""
BYTE_OF_LETTER = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}
