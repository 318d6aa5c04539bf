"""The fields of a request that give its output a form: OpenAI's `response_format`, vLLM's `structured_outputs` and
its older `guided_*`.
"""

from typing import TYPE_CHECKING, Annotated, Any

from pagoda.base.errors import RequestError
from pagoda.base.registry import nearest
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.server.body import Body, one_of

if TYPE_CHECKING:
    from pagoda.server.sampling_body import SamplingBody

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_KNOWN = ("json", "regex", "choice", "grammar", "json_object", "structural_tag", *_OPTIONS)
_IGNORED = ("disable_fallback",)  # of vLLM: there is one backend here, and so nothing to fall back to


class ResponseFormat(Body, kw_only=True, frozen=True):
    """The form of the output.

    type: Text, any JSON object, JSON by a schema, or text with JSON in tags.
    json_schema: Of type json_schema: an object whose `schema` is the schema.
    structures: Of type structural_tag: the tags, each with begin, schema and end.
    triggers: Of type structural_tag: what begins a tag.
    format: Of type structural_tag: vLLM's newer form of both, of type triggered_tags.
    """

    type: Annotated[str, one_of("text", "json_object", "json_schema", "structural_tag")]
    json_schema: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


def structure_values(body: "SamplingBody") -> dict[str, Any]:
    """Return the fields that hold JSON of any size, for RequestLimits.check_values."""
    given = body.response_format
    return {
        "response_format": [given.json_schema, given.structures, given.format] if given is not None else None,
        "structured_outputs": body.structured_outputs,
        "guided_json": body.guided_json,
    }


def structure_of(body: "SamplingBody") -> StructuredOutputsParams | None:
    """Return the form that a request asks for, or None. Raises RequestError for more than one."""
    asked: dict[str, dict[str, Any]] = {}
    if body.response_format is not None and body.response_format.type != "text":
        asked["response_format"] = _of_response_format(body.response_format)
    given = {name: value for name, value in (body.structured_outputs or {}).items() if value is not None}
    if set(given) - {*_OPTIONS, *_IGNORED}:
        asked["structured_outputs"] = _known_only(given)
    for name in _GUIDED:
        value = getattr(body, name)
        if value is not None:
            asked[name] = {name.removeprefix("guided_"): value, "whitespace_pattern": body.guided_whitespace_pattern}
    if not asked:
        return None
    source, fields = next(iter(asked.items()))
    if len(asked) > 1:
        raise RequestError(f"{' and '.join(asked)} exclude each other: give one of them", source)
    try:
        return StructuredOutputsParams(**fields, source=source)
    except RequestError as error:
        raise RequestError(str(error).replace("structured_outputs", source, 1), source) from None


def _known_only(given: dict[str, Any]) -> dict[str, Any]:
    for name in given:
        if name not in (*_KNOWN, *_IGNORED):
            raise RequestError(
                f"structured_outputs: unknown field {name!r:.80}{nearest(name, list(_KNOWN))}", "structured_outputs"
            )
    return {name: value for name, value in given.items() if name in _KNOWN}


def _of_response_format(given: ResponseFormat) -> dict[str, Any]:
    if given.type == "json_object":
        return {"json_object": True}
    if given.type == "structural_tag":
        tag = {"structures": given.structures, "triggers": given.triggers, "format": given.format}
        return {"structural_tag": tag}
    schema = (given.json_schema or {}).get("schema")
    if not isinstance(schema, dict | bool):
        raise RequestError(
            'response_format: type "json_schema" needs json_schema.schema, a JSON schema', "response_format"
        )
    return {"json": schema}
