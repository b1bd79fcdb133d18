"""The prompts, schema and tool that all clients use. Requires pydantic only.

A week takes the demo model some hundred tokens, and each value is one of few, so that an answer
ends whatever the model's quality.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel

STORY = "Tell me a long story about a fox and a bear."
PLAN = "Plan my week. Give each day an activity, the weather and the hours."
TOOL = "save_week"
TOOL_SAYS = "Saves the plan of a week."
SAVED = "The week is saved."


class Day(BaseModel):
    """The plan of a day."""

    activity: Literal["swim", "read", "cook", "walk", "paint", "sing"]
    weather: Literal["sun", "rain", "snow", "wind"]
    hours: Literal[1, 2, 3, 4, 5]


class Week(BaseModel):
    """The plan of a week."""

    monday: Day
    tuesday: Day
    wednesday: Day
    thursday: Day
    friday: Day
    saturday: Day
    sunday: Day


def closed(schema: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the JSON schema of Week without additional properties, as strict modes require."""
    schema = Week.model_json_schema() if schema is None else schema
    for one in (schema, *schema["$defs"].values()):
        one["additionalProperties"] = False
    return schema


def checked(text: str) -> str:
    """Returns the text. Raises ValueError if it is no JSON of a Week."""
    Week.model_validate(json.loads(text))
    return text


def parsed(week: Week | dict[str, Any] | None) -> str:
    """Returns a week that a client has parsed as JSON."""
    assert week is not None, "the client returned no week"
    return Week.model_validate(
        week.model_dump() if isinstance(week, Week) else week
    ).model_dump_json()


def told(text: str | None) -> str:
    """Returns the text of an answer, which must not be empty."""
    assert text, "the answer has no text"
    return text
