"""The values of `format` that JSON Schema defines; others are annotations."""

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
    | {"idn-email", "idn-hostname", "iri", "iri-reference", "regex"}
)
"""Formats that go to the library as they are; it refuses those of the second row."""
_UNRESERVED, _SUB_DELIMS = r"A-Za-z0-9\-._~", r"!$&'()*+,;="
_PCHAR = rf"([{_UNRESERVED}{_SUB_DELIMS}:@]|%[0-9A-Fa-f]{{2}})"
_SEGMENT_NO_COLON = rf"([{_UNRESERVED}{_SUB_DELIMS}@]|%[0-9A-Fa-f]{{2}})+"
_AUTHORITY = rf"([{_UNRESERVED}{_SUB_DELIMS}:@\[\]]|%[0-9A-Fa-f]{{2}})*"
FORMAT_PATTERNS = {
    # RFC 3986: a URI, or a relative reference whose first segment has no colon.
    "uri-reference": (
        rf"^([A-Za-z][A-Za-z0-9+.\-]*:(//{_AUTHORITY}(/{_PCHAR}*)*|/?({_PCHAR}+(/{_PCHAR}*)*)?)"
        rf"|//{_AUTHORITY}(/{_PCHAR}*)*|/({_PCHAR}+(/{_PCHAR}*)*)?|({_SEGMENT_NO_COLON}(/{_PCHAR}*)*)?)"
        rf"(\?({_PCHAR}|[/?])*)?(#({_PCHAR}|[/?])*)?$"
    ),
    "json-pointer": r"^(/([^~/]|~[01])*)*$",
    "relative-json-pointer": r"^(0|[1-9][0-9]*)(#|(/([^~/]|~[01])*)*)$",
    # RFC 6570: literals, and expressions of variables.
    "uri-template": (
        r"^([!#$&(-;=?-\[\]_a-z~]|[^\x00-\x7f]|%[0-9A-Fa-f]{2}|\{[+#./;?&=,!@|]?"
        r"([A-Za-z0-9_]|%[0-9A-Fa-f]{2})([A-Za-z0-9_.]|%[0-9A-Fa-f]{2})*(:[1-9][0-9]{0,3}|\*)?"
        r"(,([A-Za-z0-9_]|%[0-9A-Fa-f]{2})([A-Za-z0-9_.]|%[0-9A-Fa-f]{2})*(:[1-9][0-9]{0,3}|\*)?)*\})*$"
    ),
}
