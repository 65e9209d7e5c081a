"""The base of the sections of an experiment's settings, and the check of names of folders."""

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

LONGEST_NAME = 200  # bytes, because file systems allow 255 for a folder's name and other texts are added to this one


class Settings(BaseModel):
    """The base class of all sections: unknown keys are errors, values are checked, instances cannot be changed.

    Types are strict: neither true nor "5" is a number, and 1 is not a boolean. Numbers are finite.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_text_contains_nul(cls, value: Any) -> Any:
        """Refuse NUL, because every call of the operating system with such a path raises an error."""
        if isinstance(value, str) and "\0" in value:
            raise ValueError("it contains a NUL character; remove it")
        return value

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers_are_names(cls, table: Any) -> Any:
        """Accept a whole number for a text, because a domain may be called 100."""
        if not isinstance(table, dict):
            return table
        kinds = {key: field.annotation for key, field in cls.model_fields.items() if key in table}
        return {**table, **{key: _as_text(table[key], kind) for key, kind in kinds.items()}}


def _as_text(value: Any, kind: Any) -> Any:
    """A whole number as the text that is expected, alone or in a list; everything else unchanged."""
    if kind == list[str] and isinstance(value, list):
        return [_as_text(item, str) for item in value]
    return str(value) if kind is str and type(value) is int else value


def folder_name(value: str) -> str:
    """A text that can name one folder, and only one below its parent; ValueError says what is wrong with it."""
    if value in (".", "..") or any(sign in value for sign in "/\\") or not value.isprintable():
        raise ValueError("it names a folder: use no slashes, no control characters, and neither . nor ..")
    if len(value.encode(errors="surrogateescape")) > LONGEST_NAME:
        raise ValueError(f"it names a folder: use at most {LONGEST_NAME} bytes")
    return value
