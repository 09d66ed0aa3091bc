"""Replies that must obey: JSON of a schema, regexes, grammars, tool calls, enforced token by token."""

from longspan.structure.answer import Answer, StructuredOutputs, asked_answer, json_answer
from longspan.structure.reply import Calls, chat_structure
from longspan.structure.structure import Constraint, Structure
from longspan.structure.vocabulary import Vocabulary

__all__ = [
    "Answer",
    "Calls",
    "Constraint",
    "Structure",
    "StructuredOutputs",
    "Vocabulary",
    "asked_answer",
    "chat_structure",
    "json_answer",
]
