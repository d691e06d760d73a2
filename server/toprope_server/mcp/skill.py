"""The server's prompts as one Agent Skill (SKILL.md), for agents that read skills instead of prompts."""

from __future__ import annotations

import inspect
import json

from toprope_server.mcp.prompts import PROMPTS

NAME = "toprope"
_DESCRIPTION = (
    "Trains language models by reinforcement learning with the tools of the MCP server toprope: experiments, fair "
    "comparisons, series of runs, diagnosis, environments. Use it if the user wants to train, test, compare or "
    "diagnose a policy, or to write an environment."
)
_BEFORE = (
    "The tools belong to the MCP server toprope; if they are missing, `toprope install CLIENT` adds it. Words in "
    "UPPER CASE stand for what the user names. The owner's locks and limits hold: if a tool refuses, say so and do not "
    "look for a way around it."
)
_CODE = "```"


def skill_text() -> str:
    """Return SKILL.md: a section for each prompt, with its arguments as words in upper case."""
    parts = [f"---\nname: {NAME}\ndescription: {json.dumps(_DESCRIPTION)}\n---", "# Toprope", _BEFORE]
    for asks, title, _ in PROMPTS:
        words = {
            name: name.upper() if argument.default is inspect.Parameter.empty else argument.default
            for name, argument in inspect.signature(asks).parameters.items()
        }
        text = asks(**words).partition(_CODE)[0].rstrip()
        parts += [f"## {title}", inspect.getdoc(asks) or "", text]
    return "\n\n".join(parts) + "\n"
