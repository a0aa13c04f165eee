"""Names of LIBERO's problem files and of the experts' sub-tasks, in words."""

from __future__ import annotations

import re


def say(name: str) -> str:
    """A name of the problem file in words.

    ``flat_stove_1_cook_region`` -> ``flat stove``, ``wooden_cabinet_1_top_region`` -> ``top
    drawer``, ``akita_black_bowl_1`` -> ``black bowl``.
    """
    kind, _, part = re.sub(r"_\d+(_|$)", "\0", name, count=1).partition("\0")
    level = re.match(r"(top|middle|bottom)(_region)?$", part)
    if level:
        return f"{level[1]} drawer"
    kind = re.sub(r"^(main|kitchen|living_room|study)_table_|^akita_|_region$", "", kind)
    words = kind.replace("_", " ")
    return f"top of the {words}" if part == "top_side" else words


def say_step(name: str) -> str:
    """An expert's sub-task in words: ``open wooden_cabinet_1_top`` -> ``open the top drawer``."""
    return " ".join(f"the {say(w)}" if re.search(r"_\d", w) else w for w in name.split())


def thing_of(name: str) -> str:
    """What a sub-task handles, in words: ``open wooden_cabinet_1_top`` -> ``the top drawer``."""
    things = [word for word in name.split() if re.search(r"_\d", word)]
    return f"the {say(things[0])}" if things else "the object"
