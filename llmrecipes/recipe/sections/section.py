"""What all sections of recipes and cluster profiles have in common: the base class and the types of values."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_serializer, model_validator
from pydantic import SerializationInfo as Info
from pydantic import SerializerFunctionWrapHandler as Handler

PosInt = Annotated[int, Field(gt=0)]
NonNegInt = Annotated[int, Field(ge=0)]
PosFloat = Annotated[float, Field(gt=0)]
NonNegFloat = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Beta = Annotated[float, Field(gt=0, lt=1)]
JsonObject = dict[str, JsonValue]
AlarmVariable = Annotated[str, Field(pattern=r"^LLMRECIPES_ALARM_[A-Z0-9_]+$")]
"""Name of a variable; only such, so that a recipe cannot have the value of another one sent or run."""


class Half(Enum):
    """What a key of a recipe decides. In the type of a key, it is that of the key (`recipe.halves`)."""

    LEARNED = "learned"
    """Its numbers: what is learned from what, and how precisely it is computed."""
    EXECUTION = "execution"
    """Where, how fast and how observed it runs: numbers stay the same but for rounding, and random ones."""


LEARNED, EXECUTION = Half


class Section(BaseModel):
    """Common rules: frozen, no unknown keys, no coercion between types, no NaN or infinity."""

    # Of the keys that have no mark of their own; None: as the section around this one.
    half: ClassVar[Half | None] = None

    # The texts below the fields are read where they are shown (`recipe.reading.keys.schema`), and validators are built
    # when a file is first checked: either would double the time that `llmrecipes --help` takes.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)


class Variant(Section):
    """A section of one of several types. A subclass is the section, and has a subclass for each type, with its keys.

    Recipes are recorded, and hashed, with the keys of all types: null where a key is not set. So null stands for a key
    that is not set, also for one of another type.
    """

    keys_of_types: ClassVar[dict[str, None]]
    type: str

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if Variant in cls.__bases__:
            cls.keys_of_types = {}
        cls.keys_of_types.update(dict.fromkeys(cls.model_fields))

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None or key not in cls.keys_of_types}

    @model_serializer(mode="wrap")
    def _with_null(self, plain: Handler, info: Info) -> dict[str, Any]:
        values: dict[str, Any] = plain(self)
        if info.exclude_defaults or info.exclude_none or info.exclude_unset:
            return values
        given = {"type", *self.model_fields_set}
        return {key: values[key] if key in given else None for key in self.keys_of_types}


def type_or(default: str) -> BeforeValidator:
    """For a union of variants: the type where none is set."""
    return BeforeValidator(lambda values: {"type": default, **values} if isinstance(values, dict) else values)
