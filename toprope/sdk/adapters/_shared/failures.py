"""Causes of failed starts of games, with the remedy."""

from __future__ import annotations

import re
import sys

__all__ = ["why_not"]


def why_not(error: BaseException) -> str:
    """Say in one line why a game does not start; for missing data of NLTK, with the command that fetches it."""
    text = str(error)
    if "nltk.download" in text or "NLTK" in text:
        found = re.findall(r"nltk\.download\('([\w]+)'\)", text)
        names = " ".join(dict.fromkeys(found)) or "words averaged_perceptron_tagger_eng"
        return f"it needs data of NLTK: {sys.executable} -m nltk.downloader {names}, once, with a network"
    return " ".join(text.split())[:300] or type(error).__name__
