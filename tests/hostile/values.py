"""Values that no field expects, or that a field only seems to expect."""

from typing import Any

from tests.hostile.json_text import Deep, Flood, FloodOfKeys, Pairs, Raw

_NUMBERS = [
    *(0, 1, -1, 2, 128, 1000, 2**31 - 1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**30),
    *(0.5, -0.5, -0.0, 1e-320, 1.7e308, 3.0),
    *(Raw(text) for text in (b"1e999", b"-1e999", b"NaN", b"Infinity", b"-Infinity", b"01", b"1.", b"0x10", b"1e")),
    *(Raw(b"9" * 400), Raw(b"1" * 20_000), Raw(b"0." + b"3" * 20_000), Raw(b"1e" + b"9" * 5_000)),
]

# Text that Python can hold and no encoding can write, that an encoding reads differently, or that means something else.
_STRINGS = [
    *("", " ", "a", "\x00", "a\x00b", "\x1b[31m\x07", "\r\nX-Injected: 1", "\u202e\u2066", "\ufeff", "\uffff"),
    *("\ud800", "\udfff", "a\ud83d", "\ude00\ud83d", "ab" * 50 + "\udc80"),
    *("🏳️‍🌈" * 40, "e" + "\u0301" * 2_000, "\u1160" * 2_000, "\u200b" * 3_000, "１２３", "İ", "ﬃ", "\u2028"),
    *("1", "-1", "NaN", "null", "true", "1e999", "[1]", "{}"),
    *("../../../../etc/passwd", "file:///etc/passwd", "%s%n%x", "${7*7}", "{{7*7}}", "{0.__class__}", "__class__"),
    *("<|im_start|>system\n", "<|im_end|>", "<|endoftext|>", "<s>", "</tool_call>", "<think>", "\uf8ff{cut}\uf8ff "),
    *("a" * 65, "a" * 257, "a" * 5_000, "ab" * 50_000, " " * 20_000, "\n" * 20_000, "9" * 20_000, "é" * 20_000),
    "".join(chr(0x4E00 + i) for i in range(20_000)),
    *(Raw(text) for text in (b'"\xff"', b'"\xc0\x80"', b'"\xed\xa0\x80"', b'"\xf5\x80\x80\x80"', b'"\xe2\x82"')),
    *(Raw(text) for text in (b'"\x01"', b'"\n"', b'"\\x41"', b'"\\u12"', b'"\\ud800\\u0041"', b"'a'", b'"')),
]

_ARRAYS = [
    *([], [None], [[]], [{}], [0], [True], [-1], ["a"], [""], ["\ud800"], [[0]], [[[0]]], [1, "a", None, {}, [], 0.5]),
    *([2**31], [2**64], [1.5], [Raw(b"1e999")], [Raw(b"NaN")], ["a", 1], [0, [0]], [[0], "a"], ["a" * 30_000]),
    *(Flood(0, 1_000), Flood("a", 1_000), Flood(-1, 1_000), Flood([0], 1_000), Flood({}, 1_000), Flood(None, 1_000)),
    *(Deep(30), Deep(300), Deep(3_000), Deep(100_000), Raw(b"[" * 100_000), Raw(b"[[]"), Raw(b"[1,]"), Raw(b"[,1]")),
    [{"type": "text", "text": "\ud800"}],
    [{"type": "text"}],
    [{"type": "text", "text": Flood("a", 10)}],
    [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}],
    [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
    [{"role": "user", "content": "\ud800"}],
    [{"role": "tool", "content": "a", "tool_call_id": "\ud800"}],
    [{"type": "function", "function": {"name": "f", "parameters": Deep(500, as_objects=True)}}],
]

_OBJECTS = [
    *({}, {"": ""}, {"a": 1}, {"\ud800": 1}, {"a": "\ud800"}, {"a": {"a": {"a": None}}}, {"1": Raw(b"NaN")}),
    *({"1": 1e308}, {"-1": 1}, {"1.5": 1}, {"99999999999": 1}, {"a" * 30_000: 1}, {" 1": 1, "1": 2, "+1": 3, "1_0": 4}),
    *(FloodOfKeys(1, 1_000), FloodOfKeys("a", 1_000), Deep(30, as_objects=True), Deep(3_000, as_objects=True)),
    *(Deep(100_000, as_objects=True), Raw(b'{"a":' * 100_000), Raw(b'{"a"}'), Raw(b"{a:1}"), Raw(b'{"a":1,}')),
    Pairs((("a", 1), ("a", 2))),
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}},
    {"type": "regex", "regex": "(a*)*b"},
    {"function": {"name": "\ud800"}, "type": "function"},
    {"__class__": 1, "__proto__": 1, "constructor": 1},
    {"messages": [1], "tools": 1, "add_generation_prompt": 1, "bos_token": "\ud800"},
]

HOSTILE: tuple[Any, ...] = (None, True, False, *_NUMBERS, *_STRINGS, *_ARRAYS, *_OBJECTS)
