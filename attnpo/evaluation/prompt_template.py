"""Judge prompts of other repositories: templates with named places in braces, filled in one pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter

from attnpo.evaluation.checkout import Checkout
from attnpo.schema import Message


@dataclass(frozen=True)
class PromptTemplate:
    """Literal texts and, after each but the last, the place that follows it.

    Written like ``str.format`` reads it ("{{" is a brace), with plain names only: ``format`` itself would let a
    template of somebody else read attributes. What is put in is never read again, so answers may hold braces.
    """

    literals: tuple[str, ...]
    places: tuple[str, ...]

    @classmethod
    def read(cls, text: str, places: Sequence[str], checkout: Checkout, where: str) -> "PromptTemplate":
        """Returns the template ``text``. UserError unless it has each of ``places`` at least once and no other."""
        literals, found = [""], []
        try:
            for literal, name, form, conversion in Formatter().parse(text):
                literals[-1] += literal
                if name is not None:
                    found.append(name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else ""))
                    literals.append("")
        except ValueError as error:
            checkout.refuse(where, f"is no template ({error})")
        if set(found) != set(places):
            listed = [" ".join("{" + name + "}" for name in names) or "none" for names in (places, sorted(set(found)))]
            checkout.refuse(where, f"has to have the places {listed[0]}, it has {listed[1]}")
        return cls(tuple(literals), tuple(found))

    def fill(self, values: Mapping[str, str]) -> str:
        """Returns the text with every place filled."""
        parts = [self.literals[0]]
        for place, literal in zip(self.places, self.literals[1:], strict=True):
            parts += [values[place], literal]
        return "".join(parts)


@dataclass(frozen=True)
class GraderPrompt:
    """A system message, none where it is empty, and the template of the user's message."""

    system: str
    template: PromptTemplate

    def messages(self, values: Mapping[str, str]) -> tuple[Message, ...]:
        """Returns the messages to the grader."""
        system = (Message(role="system", content=self.system),) if self.system else ()
        return (*system, Message(role="user", content=self.template.fill(values)))
