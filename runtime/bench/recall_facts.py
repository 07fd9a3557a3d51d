"""The facts of the nano language: "The code of the red box is 4172.", how they are asked, corrected and answered.

A fact has a key (attribute, entity) and a value. One attribute has one wording, because the point of the model is
memory, not paraphrase.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from serai.runtime.bench import recall_words as words

NOT_KNOWN = "The notebook does not say."


@dataclass(frozen=True, slots=True)
class Fact:
    attribute: str
    entity: str
    value: str

    @property
    def key(self) -> tuple[str, str]:
        return self.attribute, self.entity

    def statement(self, capital: bool = True) -> str:
        start = "The" if capital else "the"
        return f"{start} {self.attribute} of {self.entity} is {self.value}."

    def answer(self) -> str:
        return self.statement()

    def with_value(self, value: str) -> "Fact":
        return Fact(self.attribute, self.entity, value)


def _digits(count: int) -> Callable[[Random], str]:
    return lambda rng: str(rng.randrange(10 ** (count - 1), 10**count))


def _pick(values: list[str], prefix: str = "") -> Callable[[Random], str]:
    return lambda rng: prefix + rng.choice(values)


LIST_LENGTHS = (2, 3, 3, 4)
LIKELIEST_COUNT = 0.5
"""The share of the commonest length, 3, among them."""


def _list(rng: Random) -> str:
    return ", ".join(rng.sample(words.FOODS, rng.choice(LIST_LENGTHS)))


OBJECT_VALUES: dict[str, Callable[[Random], str]] = {
    "code": _digits(4),
    "place": _pick(words.ROOMS, "the "),
    "owner": _pick(words.NAMES),
    "price": lambda rng: str(rng.randrange(11, 990)) + " coins",
    "label": _pick(words.SECRETS),
}
PERSON_VALUES: dict[str, Callable[[Random], str]] = {
    "job": _pick(words.JOBS),
    "home": _pick(words.CITIES),
    "pet": lambda rng: rng.choice(words.COLOURS) + " " + rng.choice(words.ANIMALS),
    "password": lambda rng: " ".join(rng.sample(words.SECRETS, 2)),
    "friend": _pick(words.NAMES),
    "birthday": lambda rng: f"{rng.randrange(1, 29)} {rng.choice(words.MONTHS)}",
    "room": lambda rng: str(rng.randrange(101, 999)),
    "colour": _pick(words.COLOURS),
    "list": _list,
}
WEIGHTS = {
    "code": 5.0, "place": 3.0, "owner": 2.0, "price": 1.5, "label": 1.5, "job": 3.0, "home": 3.0, "pet": 1.5,
    "password": 2.0,
    "friend": 1.0, "birthday": 1.0, "room": 1.5, "colour": 1.0, "list": 1.0,
}  # fmt: skip
ATTRIBUTES = tuple(WEIGHTS)


def random_entity(rng: Random, attribute: str) -> str:
    if attribute in OBJECT_VALUES:
        return f"the {rng.choice(words.COLOURS)} {rng.choice(words.OBJECTS)}"
    return rng.choice(words.NAMES)


def random_value(rng: Random, attribute: str, entity: str, unlike: str = "") -> str:
    draw = OBJECT_VALUES.get(attribute) or PERSON_VALUES[attribute]
    value = draw(rng)
    while value in (unlike, entity):
        value = draw(rng)
    return value


def chance(attribute: str) -> float:
    """How often somebody who was told nothing guesses a value: one in as many as there are, all being equally likely.

    Of a list the shortest is the likeliest: of two things, which is one list in four.
    """
    foods = len(words.FOODS)
    counts = {
        "code": 9_000, "place": len(words.ROOMS), "owner": len(words.NAMES), "price": 979, "label": len(words.SECRETS),
        "job": len(words.JOBS), "home": len(words.CITIES), "pet": len(words.COLOURS) * len(words.ANIMALS),
        "password": len(words.SECRETS) * (len(words.SECRETS) - 1), "friend": len(words.NAMES),
        "birthday": 28 * len(words.MONTHS), "room": 898, "colour": len(words.COLOURS), "list": 4 * foods * (foods - 1),
    }  # fmt: skip
    return 1 / counts[attribute]


def random_fact(rng: Random, taken: set[tuple[str, str]], attribute: str | None = None) -> Fact:
    """A fact whose key is not in `taken` (and adds it). Weighted over attributes unless one is given."""
    while True:
        chosen = attribute or rng.choices(ATTRIBUTES, list(WEIGHTS.values()))[0]
        entity = random_entity(rng, chosen)
        if (chosen, entity) not in taken:
            taken.add((chosen, entity))
            return Fact(chosen, entity, random_value(rng, chosen, entity))


def neighbour_key(rng: Random, facts: list[Fact], taken: set[tuple[str, str]]) -> tuple[str, str]:
    """A key never mentioned, close to ones that were: the entity or the attribute usually occurs in the notebook."""
    while True:
        fact = rng.choice(facts)
        pool = tuple(OBJECT_VALUES) if fact.attribute in OBJECT_VALUES else tuple(PERSON_VALUES)
        key = (
            (rng.choice(pool), fact.entity)
            if rng.random() < 0.5
            else (fact.attribute, random_entity(rng, fact.attribute))
        )
        if key not in taken:
            return key


QUESTIONS = (
    "What is the {a} of {e}?", "What is the {a} of {e}?", "What is the {a} of {e}?", "Tell me the {a} of {e}.",
    "Please tell me the {a} of {e}.", "Do you know the {a} of {e}?", "And the {a} of {e}?",
)  # fmt: skip


def question(rng: Random | None, attribute: str, entity: str) -> str:
    """How the key is asked; without a generator the plainest wording."""
    template = QUESTIONS[0] if rng is None else rng.choice(QUESTIONS)
    return template.format(a=attribute, e=entity)


LEADS = ("Note: ", "Remember: ", "Also, ", "Please remember that ", "I wrote down that ", "They told me that ")


def told(rng: Random, fact: Fact) -> str:
    """The fact as a notebook sentence, sometimes with a lead-in."""
    return rng.choice(LEADS) + fact.statement(capital=False) if rng.random() < 0.2 else fact.statement()


CORRECTIONS = ("Correction: ", "Correction: ", "Correction: ", "I was wrong. Correction: ", "Sorry. Correction: ")


def corrected(rng: Random | None, fact: Fact) -> str:
    """The sentence that overwrites an earlier fact with the same key."""
    lead = CORRECTIONS[0] if rng is None else rng.choice(CORRECTIONS)
    return lead + fact.statement(capital=False)


def filler(rng: Random) -> str:
    """A plain sentence that states no fact."""
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(words.REMARKS)
    subject, verb, where, when = (rng.choice(s) for s in (words.SUBJECTS, words.VERBS, words.WHERE, words.WHEN))
    if kind < 0.5:
        sentence = f"{when}, {subject} {verb} {where}."
    elif kind < 0.8:
        sentence = f"{subject} {verb} {where}."
    else:
        sentence = f"{subject} {verb} {when}."
    return sentence[0].upper() + sentence[1:]


def count_question(rng: Random | None, entity: str) -> str:
    return f"How many things are on the list of {entity}?"


def count_answer(fact: Fact) -> str:
    return f"The list of {fact.entity} has {len(fact.value.split(', '))} things."
