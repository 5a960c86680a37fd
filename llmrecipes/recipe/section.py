"""What all sections of recipes and cluster profiles have in common: the base class and the types of values."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue

PosInt = Annotated[int, Field(gt=0)]
NonNegInt = Annotated[int, Field(ge=0)]
PosFloat = Annotated[float, Field(gt=0)]
NonNegFloat = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Beta = Annotated[float, Field(gt=0, lt=1)]
JsonObject = dict[str, JsonValue]
AlarmVariable = Annotated[str, Field(pattern=r"^LLMRECIPES_ALARM_[A-Z0-9_]+$")]
"""Name of a variable; only such, so that a recipe cannot have the value of another one sent or run."""


class Section(BaseModel):
    """Common rules: frozen, no unknown keys, no coercion between types, no NaN or infinity."""

    # The texts below the fields are read where they are shown (`recipe.keys.schema`), and validators are built when a
    # file is first checked: either would double the time that `llmrecipes --help` takes.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)
