"""Small JSON schemas that end by themselves, and what a value must be to be allowed by one."""

from typing import Any

from hypothesis import strategies as st

KEYS = ("a", "naïve", "<|close|>", 'q"uote', "type", "format")
WORDS = ("x", "<|sep|>", "über", 'a "b"', "", "two words")


def schemas(*, depth: int = 2) -> st.SearchStrategy[dict[str, Any]]:
    """Schemas whose values are bounded, so that any model comes to their end."""
    leaves: st.SearchStrategy[Any] = (
        st.fixed_dictionaries({"enum": st.lists(st.sampled_from(WORDS) | st.integers(0, 9), min_size=1, unique=True)})
        | st.fixed_dictionaries({"type": st.just("string"), "maxLength": st.integers(0, 6)})
        | st.integers(-20, 20).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 30})
        | st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}])
    )
    if depth == 0:
        return leaves
    inner = schemas(depth=depth - 1)
    larger: st.SearchStrategy[Any] = (
        leaves
        | objects(inner)
        | st.fixed_dictionaries({"anyOf": st.lists(leaves, min_size=1, max_size=2)})
        | st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 2))
    )
    return larger


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects of a few members, some of them required."""
    return st.dictionaries(st.sampled_from(KEYS), inner, max_size=3).flatmap(
        lambda members: st.builds(
            lambda required: {
                "type": "object",
                "properties": members,
                "required": required,
                "additionalProperties": False,
            },
            st.lists(st.sampled_from(sorted(members)), unique=True) if members else st.just([]),
        )
    )


def allows(schema: dict[str, Any], value: Any) -> bool:
    """Whether a schema of these allows a value."""
    if "enum" in schema:
        return any(type(one) is type(value) and one == value for one in schema["enum"])
    if "anyOf" in schema:
        return any(allows(inner, value) for inner in schema["anyOf"])
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return any(_is(type_, schema, value) for type_ in types)


def _is(type_: str, schema: dict[str, Any], value: Any) -> bool:
    match type_:
        case "object":
            properties = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= value.keys() <= properties.keys()
                and all(allows(properties[key], one) for key, one in value.items())
            )
        case "array":
            return (
                isinstance(value, list)
                and len(value) <= schema["maxItems"]
                and all(allows(schema["items"], one) for one in value)
            )
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "boolean":
            return isinstance(value, bool)
        case _:
            return value is None
