"""Makes JSON schemas by chance, of the keywords that clients use."""

from random import Random
from typing import Any

Schema = dict[str, Any]

_WORDS = ("name", "size", "a b", "x", "naïve", 'q"q', "next")
_PATTERNS = ("^[a-f]{2,4}$", "^(red|green)-[0-9]+$", "[0-9]", "^x*$")
_FORMATS = ("date", "time", "uuid", "ipv4", "email")


def generated_schema(random: Random, depth: int = 3) -> Schema:
    """A schema that a short text can fit.

    Args:
        random: chooses.
        depth: of objects and lists within each other.
    """
    leaves = (_number, _integer, _text, _enum, _plain)
    inner = (_object, _object, _array, _tuple, _any_of, _recursive)
    return random.choice(leaves if depth == 0 or random.random() < 0.3 else inner)(random, depth)


def _plain(random: Random, depth: int) -> Schema:
    return {"type": random.choice(["boolean", "null", ["boolean", "null"], ["integer", "null"]])}


def _integer(random: Random, depth: int) -> Schema:
    least = random.randint(-200, 200)
    schema: Schema = {"type": "integer"}
    if random.random() < 0.7:
        schema["minimum"] = least
    if random.random() < 0.7:
        schema["exclusiveMaximum"] = least + random.randint(8, 3000)
    if random.random() < 0.2:
        schema["multipleOf"] = random.choice([2, 3, 5])
    return schema


def _number(random: Random, depth: int) -> Schema:
    least = random.randint(-50, 50) / 4
    return {"type": "number", "minimum": least, "maximum": least + random.randint(1, 99) / 8}


def _text(random: Random, depth: int) -> Schema:
    schema: Schema = {"type": "string"}
    kind = random.randrange(4)
    if kind == 0:
        schema["pattern"] = random.choice(_PATTERNS)
    elif kind == 1:
        schema["format"] = random.choice(_FORMATS)
    elif kind == 2:
        schema["minLength"] = random.randrange(4)
        schema["maxLength"] = schema["minLength"] + random.randrange(12)
    return schema


def _enum(random: Random, depth: int) -> Schema:
    values = ["a", "tab\t", "é", 7, -1.5, True, None, [1, "x"], {"k": []}]
    if random.random() < 0.3:
        return {"const": random.choice(values)}
    return {"enum": random.sample(values, random.randint(1, 5))}


def _object(random: Random, depth: int) -> Schema:
    names = random.sample(_WORDS, random.randint(0, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: generated_schema(random, depth - 1) for name in names},
        "required": [name for name in names if random.random() < 0.6],
        "additionalProperties": False,
    }
    if random.random() < 0.2:
        schema["additionalProperties"] = generated_schema(random, 0)
    return schema


def _array(random: Random, depth: int) -> Schema:
    least = random.randrange(3)
    items = generated_schema(random, depth - 1)
    return {
        "type": "array",
        "items": items,
        "minItems": least,
        "maxItems": least + random.randrange(3),
    }


def _tuple(random: Random, depth: int) -> Schema:
    items = [generated_schema(random, depth - 1) for _ in range(random.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _any_of(random: Random, depth: int) -> Schema:
    return {"anyOf": [generated_schema(random, depth - 1) for _ in range(random.randint(1, 3))]}


def _recursive(random: Random, depth: int) -> Schema:
    node = {
        "type": "object",
        "properties": {"value": generated_schema(random, 0), "next": {"$ref": "#/$defs/node"}},
        "required": ["value"],
        "additionalProperties": False,
    }
    # References are resolved from the root, so this one stands alone.
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"} if depth == 3 else _plain(random, 0)
