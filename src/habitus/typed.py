"""Frozen, typed values with a TOML and a JSON form; an unknown key is refused with the nearest known one."""

import difflib
import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from functools import lru_cache
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any, NoReturn, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from habitus.errors import ConfigError
from habitus.files import write_atomic

CHECKSUM = "sha256"  # the key of a Sealed file's checksum


class Typed(BaseModel):
    """Base of everything that is stored as TOML or JSON: immutable, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str) -> Self:
        """The object that `values` describe; errors call them `source`, the name of a file or an option."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            lines = [explain_error(cls, detail) for detail in error.errors()]
            raise ConfigError(
                f"{source}: " + "; ".join(lines),
                expected=f"the keys and types of {cls.__name__}",
                next_step=f"fix {source} and run again",
            ) from error

    @classmethod
    def from_json(cls, content: bytes, source: str) -> Self:
        """The object that JSON text describes; much faster than `parse`, which is asked only to word an error."""
        try:
            return cls.model_validate_json(content)
        except ValidationError:
            return cls.parse(_parse_json(content, source), source)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The object stored in a .toml or .json file."""
        return cls.parse(cls.read_values(path), str(path))

    @classmethod
    def read_values(cls, path: str | Path) -> dict[str, Any]:
        """The plain values in a .toml or .json file, before they are checked."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist", expected=f"a file that holds a {cls.__name__}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path} cannot be read: {error}", expected=f"a file that holds a {cls.__name__}"
            ) from None
        try:
            return _parse_json(text, str(path)) if path.suffix == ".json" else tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigError(f"{path} cannot be parsed: {error}", expected="valid TOML") from None

    def write(self, path: str | Path) -> None:
        """Write the JSON form to a .json file, the TOML form to any other. The file appears complete or not at all."""
        path = Path(path)
        try:
            write_atomic(path, (self.to_json() if path.suffix == ".json" else self.to_toml()).encode())
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror}", expected="a file name in a folder that can be written"
            ) from error

    def to_values(self) -> dict[str, Any]:
        """Plain values, ready for JSON or TOML. A value that is None is left out."""
        return self.model_dump(mode="json", exclude_none=True, by_alias=True)

    def to_json(self) -> str:
        return _format_json(self.to_values())

    def to_toml(self) -> str:
        return to_toml(self.to_values())


class Sealed(Typed):
    """Values whose JSON carries the checksum of its content: what was edited or damaged is refused.

    JSON without a checksum was written by an earlier version or by hand, and is read as it is.
    """

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str) -> Self:
        if not isinstance(values, Mapping) or CHECKSUM not in values:
            return super().parse(values, source)
        content = {name: value for name, value in values.items() if name != CHECKSUM}
        if values[CHECKSUM] != content_hash(content):
            raise ConfigError(
                f"{source} has been changed since it was written: its {CHECKSUM} is not that of its content",
                expected="the file as habitus wrote it",
                next_step=f"restore it or write it again; without its {CHECKSUM} it is read as it is",
            )
        return super().parse(content, source)

    def to_json(self) -> str:
        values = self.to_values()
        return _format_json(values | {CHECKSUM: content_hash(values)})


class InlineTable(dict[str, Any]):
    """A mapping that TOML writes in one line."""


def canonical_json(value: Any) -> bytes:
    """The one spelling of a value that hashes are computed from: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def content_hash(value: Any) -> str:
    """SHA-256 of the canonical JSON, in hex."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def suggest_name(name: str, names: list[str]) -> str:
    """'did you mean ...?' with the closest of `names`, or all of them where none is close."""
    by_folded = {other.casefold(): other for other in names}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return f"did you mean {by_folded[close[0]]!r}?" if close else f"known: {', '.join(sorted(names))}"


def apply_overrides(values: Mapping[str, Any], overrides: list[str]) -> dict[str, Any]:
    """A copy of nested `values` with dotted overrides `section.key=value` applied; values are TOML."""
    result = json.loads(json.dumps(values))
    for override in overrides:
        dotted, separator, text = override.partition("=")
        if not separator or not dotted:
            raise ConfigError(f"override {override!r} has no '='", expected="section.key=value, as in train.steps=500")
        *sections, key = dotted.strip().split(".")
        target = result
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise ConfigError(f"override {override!r}: {section!r} is a value, not a section")
        target[key] = _toml_scalar(text.strip())
    return result


def to_toml(values: Mapping[str, Any]) -> str:
    """TOML text of nested mappings of strings, numbers, booleans and flat lists."""
    return "\n".join(_toml_lines(values, prefix="")) + "\n"


def _parse_json(content: str | bytes, source: str) -> Any:
    try:
        return json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} cannot be parsed: {error}", expected="valid JSON") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _format_json(values: Any) -> str:
    return _indent_json(values, "\n") + "\n"


def _indent_json(value: Any, line: str) -> str:
    """What json.dumps(value, indent=2) writes, at C's speed: its own indenting is Python, entry by entry."""
    if type(value) is str:
        return encode_basestring(value)
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return repr(value)
    if not value or not isinstance(value, (dict, list)):
        return _flat_encoder(",")(value)
    inner = f"{line}  "
    types = set(map(type, value.values() if isinstance(value, dict) else value))
    if dict not in types and list not in types:
        body = _flat_encoder(f",{inner}")(value)[1:-1]
    elif isinstance(value, dict):
        body = f",{inner}".join([f"{encode_basestring(k)}: {_indent_json(v, inner)}" for k, v in value.items()])
    else:
        body = f",{inner}".join([_indent_json(v, inner) for v in value])
    left, right = "{}" if isinstance(value, dict) else "[]"
    return f"{left}{inner}{body}{line}{right}"


@lru_cache
def _flat_encoder(separator: str) -> Callable[[Any], str]:
    """The JSON of what holds no list or mapping, or of one that holds none itself."""
    return json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(separator, ": ")).encode


def _toml_lines(values: Mapping[str, Any], prefix: str) -> list[str]:
    lines = [f"{_toml_key(k)} = {_toml_value(v)}" for k, v in values.items() if not _is_section(v)]
    if prefix and (lines or not values):
        lines.insert(0, f"[{prefix}]")
    for key, value in values.items():
        if _is_section(value):
            inner = _toml_lines(value, f"{prefix}.{_toml_key(key)}" if prefix else _toml_key(key))
            lines += ([""] if lines else []) + inner
    return lines


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping) and not isinstance(value, InlineTable)


def _toml_key(key: str) -> str:
    bare = key.replace("_", "").replace("-", "")
    return key if bare.isascii() and bare.isalnum() else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON escapes are TOML escapes, except that TOML also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, InlineTable):
        return "{ " + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items()) + " }"
    return repr(value)


def _toml_scalar(text: str) -> Any:
    """A TOML value; a bare word is a string, since that is what people type on a command line."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def explain_error(cls: type[BaseModel], detail: Any) -> str:
    """One error of pydantic in our words, with the nearest name for an unknown key."""
    place = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        *sections, key = detail["loc"]
        return f"unknown key {place!r} ({suggest_name(str(key), _keys_at(cls, sections))})"
    if detail["type"] == "missing":
        return f"{place!r} is missing"
    message = detail["msg"].removeprefix("Value error, ")
    if isinstance(detail["input"], Mapping):
        return f"{place}: {message}" if place else message
    return f"{place} = {detail['input']!r}: {message}"


def _keys_at(cls: type[BaseModel], sections: list[Any]) -> list[str]:
    for section in sections:
        field = cls.model_fields.get(str(section))
        # A section, or one that may be absent.
        types = () if field is None else (field.annotation, *get_args(field.annotation))
        inner = [type_ for type_ in types if isinstance(type_, type) and issubclass(type_, BaseModel)]
        if len(inner) != 1:
            return []
        cls = inner[0]
    return [field.alias or name for name, field in cls.model_fields.items()]
