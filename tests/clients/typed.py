"""Types that people ask models for, with what JSON schemas say in unusual ways."""

import enum
from decimal import Decimal
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Mood(enum.Enum):
    SAD = "sad"
    HAPPY = "happy"


class Part(BaseModel):
    """A part of a typed answer. It has no other properties, as a small model would add some."""

    model_config = ConfigDict(extra="forbid")


class Feeling(Part):
    """What clients can say that leave out bounds, or ask for all of a schema."""

    mood: Mood
    pet: Literal["cat", "dog"] | None


class Toy(Part):
    name: Literal["ball", "doll"]
    # A small model would write words for the text that pydantic allows as well.
    price: Decimal = Field(ge=1, le=9, json_schema_extra={"pattern": r"^[1-8](\.\d)?$"})


class Child(Part):
    """A child with its toys."""

    mood: Mood
    colours: set[Literal["red", "blue"]] = Field(max_length=3)
    toys: list[Toy] = Field(min_length=1, max_length=2)
    pet: Literal["cat", "dog"] | None = None


def check(child):
    """Checks that it is such a child, down to its parts."""
    assert isinstance(child, Child), child
    assert isinstance(child.mood, Mood)
    assert isinstance(child.colours, set)
    assert all(isinstance(toy.price, Decimal) for toy in child.toys)
