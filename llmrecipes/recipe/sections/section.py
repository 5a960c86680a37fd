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
NonEmpty = Annotated[str, Field(min_length=1)]
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

    Recipes are recorded, and hashed, with the keys of all types: null where a key is not set, or with
    `records_defaults` its default. So these stand for a key that is not set, also for one of another type.
    """

    records_defaults: ClassVar[bool] = False
    unset: ClassVar[dict[str, Any]]  # by key of any type, what is recorded where it is not set
    type: str

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if Variant in cls.__bases__:
            cls.unset = {}
        for key, field in cls.model_fields.items():
            has_default = cls.records_defaults and not field.is_required()
            cls.unset.setdefault(key, field.default if has_default else None)

    @model_validator(mode="before")
    @classmethod
    def _without_unset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        checked = cls.model_fields if cls.records_defaults else ()
        return {
            key: value
            for key, value in values.items()
            if key in checked or key not in cls.unset or value != cls.unset[key]
        }

    @model_serializer(mode="wrap")
    def _with_unset(self, plain: Handler, info: Info) -> dict[str, Any]:
        values: dict[str, Any] = plain(self)
        if info.exclude_defaults or info.exclude_none or info.exclude_unset:
            return values
        if not self.records_defaults:
            given = {"type", *self.model_fields_set}
            return {key: values[key] if key in given else None for key in self.unset}
        own = type(self).model_fields  # of which some may be excluded
        return {key: values.get(key, unset) for key, unset in self.unset.items() if key in values or key not in own}


def type_or(default: str) -> BeforeValidator:
    """For a union of variants: the type where none is set."""
    return BeforeValidator(lambda values: {"type": default, **values} if isinstance(values, dict) else values)
